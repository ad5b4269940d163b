"""MiniCPM-V 2.6 to 4.5 and MiniCPM-o, whose code stands beside their weights: several text models by their version."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from octavo.config.media.encoder_sizes import checked_audio
from octavo.config.section import Section
from octavo.errors import UnsupportedModel

_TEXT: Final = {"2.6": "qwen2", "4.0": "llama", "4.5": "qwen3"}
"""Families of text models by `version`."""


def minicpm_layout(config: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """Return a config that names the families of its text model and of its encoder.

    Raises CheckpointError, and UnsupportedModel for another version.
    """
    section = Section(config, where)
    version = str(config.get("version", "2.5"))
    if version not in _TEXT:
        raise UnsupportedModel(f"{where}: version is {version}, expected one of {', '.join(_TEXT)}")
    section.expect("slice_mode", True, default=True)
    vision = section.section("vision_config")
    if vision is None:
        raise section.error("vision_config", "the sizes of the encoder")
    return {
        **{name: value for name, value in config.items() if name != "auto_map"},
        "model_type": _TEXT[version],
        "query_num": section.positive("query_num", 64),
        "vision_config": {**vision.values, "model_type": "siglip_vision_model"},
    }


def minicpm_sounds(config: Section) -> Section | None:
    """Return the part of the encoder of sounds with what is around it; None for a checkpoint that leaves it out.

    Raises CheckpointError or UnsupportedModel.
    """
    section = checked_audio(config)
    if section is None or not config.bool("init_audio", True):
        return None
    width, seconds = section.positive("d_model"), config.float("audio_chunk_length", 1.0)
    if section.positive("encoder_ffn_dim") != 4 * width:
        raise section.error("encoder_ffn_dim", f"four times d_model, which is {width}")
    if not (seconds <= 0.0 or 0.02 <= seconds <= 3600.0):
        raise config.error("audio_chunk_length", "seconds from 0.02 to 3,600, or 0 for one chunk")
    own = {"audio_chunk_length": seconds, "audio_pool_step": config.positive("audio_pool_step", 2)}
    return Section({**section.values, **own}, section.where, "audio_config.")
