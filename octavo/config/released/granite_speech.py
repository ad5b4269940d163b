"""The encoder of Granite Speech, with the projector beside it."""

from __future__ import annotations

from octavo.config.media.encoder_sizes import check_encoder
from octavo.config.section import Section


def granite_sounds(config: Section) -> Section:
    """Return the encoder's part with the sizes of the projector beside it. Raises CheckpointError."""
    section, projector = config.part("encoder_config"), config.section("projector_config")
    for each in (section, projector):
        check_encoder(each)
    size, rate = config.positive("window_size", 15), config.positive("downsample_rate", 5)
    if size % rate:
        raise config.error("window_size", f"a multiple of downsample_rate, which is {rate}")
    width, read = section.positive("hidden_dim", 1024), (projector or config).positive("encoder_hidden_size", 1408)
    joined = section.values.get("cat_hidden_layers") or []
    layers = range(1 + section.positive("num_layers", 10))
    if not isinstance(joined, list) or any(type(each) is not int or each not in layers for each in joined):
        raise section.error("cat_hidden_layers", f"a list of layers, from 0 to {layers[-1]}")
    if len({*joined}) < len(joined):
        raise section.error("cat_hidden_layers", "each layer once")
    width *= 1 + len(joined)
    if projector is not None and read != width:
        raise projector.error("encoder_hidden_size", f"the width of what the encoder returns, which is {width}")
    return Section({**section.values, "window_size": size, "downsample_rate": rate}, section.where, "encoder_config.")
