"""MiniCPM-V 2.6 to 4.5 and MiniCPM-o, whose code stands beside their weights: several text models by their version."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from octavo.config.section import Section
from octavo.errors import UnsupportedModel

MINICPM_O: Final = "MiniCPMO"
MINICPM_V: Final = ("MiniCPMV", MINICPM_O)
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
