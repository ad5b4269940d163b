"""Ultravox, whose folders have an encoder of sounds and a projector; its text model stands in another folder.

`text_model_id` names the repository of the text model, and `audio_model_id` that of the encoder where its weights are
not beside the projector's; both are given as folders by `hf_overrides`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from octavo.config.media.encoder_sizes import check_encoder, checked_audio
from octavo.config.section import Section, read_json_object
from octavo.errors import UnsupportedModel

RELEASED: Final = "UltravoxModel"
ULTRAVOX: Final = "UltravoxForConditionalGeneration"
"""What it is called here: names that end in Model are those of models that make vectors."""
_PARTS: Final = {"text_model_id": "text_config", "audio_model_id": "audio_config"}
"""Keys for the folders of parts, with those for their configs."""
_CONFIG: Final = "config.json"


def ultravox_layout(config: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """Return a config with those of its parts in it. Raises CheckpointError, and UnsupportedModel where a part is in
    no folder of this machine."""
    stated = Section(config, where)
    parts: dict[str, Any] = {}
    for key, part in _PARTS.items():
        if config.get(key) is not None:
            parts[part] = _config_in(stated, key)
    if "text_config" in parts:
        text = Section(parts["text_config"], str(Path(stated.str("text_model_id")) / _CONFIG))
        text.refuse("quantization_config", because="octavo does not join weights of several formats")
        parts["text_config"] = (text.section("text_config") or text).values
    own = {name: value for name, value in config.items() if name != "auto_map"}
    return {**own, **parts, "architectures": [ULTRAVOX]}


def folders_beside(stored: Section) -> tuple[Path, ...]:
    """Return the folders with the other weights of a model in this layout; () for any other model."""
    if stored.values.get("architectures") != [ULTRAVOX]:
        return ()
    return tuple(Path(stored.str(key)) for key in _PARTS if stored.values.get(key) is not None)


def ultravox_sounds(config: Section) -> Section | None:
    """Return the part of the encoder with how many of its vectors become one; None for a checkpoint without one.

    Raises CheckpointError or UnsupportedModel.
    """
    section = checked_audio(config)
    if section is None:
        return None
    config.refuse("audio_latency_block_size", because="this Ultravox is not implemented")
    config.expect("projector_act", "swiglu", default="swiglu")
    stacked, count = config.positive("stack_factor", 8), section.positive("max_source_positions", 1500)
    if stacked > count:
        raise config.error("stack_factor", f"at most max_source_positions, which is {count}")
    if num_layers := config.count("num_projector_layers", 0):
        check_encoder(Section({"num_projector_layers": num_layers}, config.where))
    elif config.positive("hidden_size", 4096) % 2:
        raise config.error("hidden_size", "an even number: half of it are gates")
    return Section({**section.values, "stack_factor": stacked}, section.where, "audio_config.")


def _config_in(stated: Section, key: str) -> Mapping[str, Any]:
    """Return the config of a part."""
    named = stated.str(key)
    if not (Path(named) / _CONFIG).is_file():
        raise UnsupportedModel(
            f"{stated.origin(key)}: {key} is {named}, and {RELEASED} reads that part from a folder of this machine: "
            f'download it, and set hf_overrides={{"{key}": "PATH OF THE FOLDER"}}'
        )
    return read_json_object(Path(named) / _CONFIG)
