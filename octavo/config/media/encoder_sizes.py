"""Checks sizes of encoders of images and sounds by name, before transformers and torch read them."""

from __future__ import annotations

import math
import re
from collections.abc import Collection
from typing import Final

from octavo.config.section import Section

_SIZE: Final = re.compile(
    r"(?!.*ngram|dropout)\w+_(size|dim|heads|layers|channels|positions)|num_\w+|depths?|d_model|mlp_ratio|tokens_per_second"
)
_EQUAL: Final = ("projector_input_dim", "projector_output_dim", "vision_output_dim")
_WIDTHS: Final = ("embed_dim", "d_model", "hidden_size")
_HEADS: Final = ("num_attention_heads", "num_heads", "encoder_attention_heads")
_SHARES: Final = ("dropout", "dropout_positions", "dropout_prob", "dropout_rate", "layerdrop", "drop_path_rate")
_SIDES: Final = ("image_size", "patch_size")
_LENGTHS: Final = ("image_size", "window_size", "max_source_positions")
_LONGEST: Final = 1 << 16
"""More pixels, frames or positions would take all memory."""
_LARGEST: Final = 1 << 22
"""Largest value of other sizes: norms are tried with rows of their width before they are compared with tensors."""
_LAYERS: Final = re.compile(r"depths?|(\w+_)?layers")
_MOST_LAYERS: Final = 1 << 10
"""Most layers of an encoder, and of its stages together: each one is made before tensors are compared."""
_AT_LEAST: Final = (("image_size", ("patch_size",)), ("window_size", ("patch_size", "spatial_merge_size")))


def check_encoder(section: Section | None) -> None:
    """Raise CheckpointError for a size or a count below 1, and for sizes that do not divide or hold another.

    Encoders within one, in sections of their own, are checked too.
    """
    if section is None:
        return
    for name, value in section.values.items():
        if name.endswith("_config"):
            check_encoder(section.section(name))
        if value is not None:
            _check_value(section, name, value)
    _check_rope(section.part("rope_parameters"))
    _check_heads(section)
    _check_least(section)
    equal = [each for each in _EQUAL if section.values.get(each) is not None]
    for name in equal[1:]:
        if section.int(name) != section.int(equal[0]):
            raise section.error(name, f"the same as {equal[0]}, which is {section.int(equal[0])}")
    if equal and section.values.get("pixel_shuffle_ratio") is not None:
        _check_shuffle(section)


def checked_audio(config: Section) -> Section | None:
    """Return the part of config.json with the encoder of sounds; None where there is none. Raises CheckpointError."""
    section = config.section("audio_config")
    check_encoder(section)
    check_encoder(config.section("adaptor_config"))
    return section


def _check_value(section: Section, name: str, value: object) -> None:
    """Raise CheckpointError where a value that is a share or a size by its name is none."""
    if name.endswith(_SHARES) and not 0.0 <= section.float(name) <= 1.0:
        raise section.error(name, "a share, 0 to 1")
    if name.endswith("eps") and section.float(name) < 0.0:
        raise section.error(name, "a number of at least 0")
    if not _SIZE.fullmatch(name):
        return
    most = _MOST_LAYERS if _LAYERS.fullmatch(name) else _LONGEST if name in _LENGTHS else _LARGEST
    if isinstance(value, list):
        numbers = [each for part in value for each in (part if isinstance(part, list) else [part])]
        if not all(type(each) is int and 0 < each <= most for each in numbers):
            raise section.error(name, f"integers from 1 to {most:,}")
        if name == "depths" and sum(numbers) > most:
            raise section.error(name, f"at most {most:,} layers together")
        if name in _SIDES and len(value) != 2:
            raise section.error(name, "an integer, or a height and a width")
    elif isinstance(value, float):
        section.positive_float(name)
    elif section.positive(name) > most:
        raise section.error(name, f"at most {most:,}")


def _check_rope(rope: Section) -> None:
    if "rope_theta" in rope.values:  # for which transformers takes a null
        rope.positive_float("rope_theta")
    if rope.positive_float("partial_rotary_factor", 1.0) > 1.0:
        raise rope.error("partial_rotary_factor", "a share of a head, at most 1")


def _check_least(section: Section) -> None:
    """Raise CheckpointError where an image has no patch, or a window has none that can be merged."""
    for name, parts in _AT_LEAST:
        if all(type(section.values.get(each)) is int for each in (name, *parts)):
            least = math.prod(map(section.int, parts))
            if section.int(name) < least:
                raise section.error(name, f"at least {' times '.join(parts)}, which is {least}")


def _check_heads(section: Section) -> None:
    """Raise CheckpointError where heads do not make the width."""
    width, heads = _first(section, _WIDTHS), _first(section, _HEADS)
    if width and heads and section.values.get("head_dim") is None and section.int(width) % section.int(heads):
        raise section.error(width, f"a multiple of {heads}, which is {section.int(heads)}")
    if section.values.get("model_type") == "pixtral":  # where tables of rotations have this size, and heads the other
        size, number = section.positive("hidden_size", 1024), section.positive("num_attention_heads", 16)
        if section.positive("head_dim", size // number) * number != size:
            raise section.error("head_dim", f"hidden_size over num_attention_heads, which are {size} and {number}")


def _check_shuffle(section: Section) -> None:
    """Raise CheckpointError where the vectors of an image cannot be joined as Llama 4 joins them."""
    ratio = section.positive_float("pixel_shuffle_ratio")
    joined = round(1 / ratio)
    if ratio * joined != 1.0:
        raise section.error("pixel_shuffle_ratio", "one over an integer")
    width = section.positive("hidden_size", 768) * joined**2
    if section.positive("intermediate_size", 5632) != width:
        raise section.error("intermediate_size", f"hidden_size times {joined**2}, which is {width}")
    if section.positive("image_size", 448) // section.positive("patch_size", 14) % joined:
        raise section.error("image_size", f"a multiple of {joined} patches")


def _first(section: Section, names: Collection[str]) -> str | None:
    return next((name for name in names if section.values.get(name) is not None), None)
