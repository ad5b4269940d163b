"""Config and image processor of Nemotron 3 Omni as NVIDIA released them, and as transformers has them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from octavo.config.section import Section

NEMOTRON_OMNI: Final = tuple(f"NemotronH_{size}Omni_Reasoning_V3" for size in ("Nano_", "Super_", ""))
"""The architectures of the releases, and transformers' name of them."""
NEMOTRON_IMAGES: Final = "NemotronH_Omni_Reasoning_V3ImageProcessor"
_STATED: Final = frozenset({"image_processor_type", "max_num_patches", "norm_mean", "patch_size"})


def nemotron_settings(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of an image processor by transformers' names; those of something else as they are."""
    if not values.keys() & _STATED:
        return dict(values)
    numbers = {f"image_{name}": values.get(f"norm_{name}") for name in ("mean", "std")}
    stated = {name: value for name, value in numbers.items() if value is not None}
    return {**stated, **values, "image_processor_type": NEMOTRON_IMAGES}


def nemotron_layout(config: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """Return the config of a release as transformers has it. Raises CheckpointError."""
    config = {"text_config": config["llm_config"], **{name: config[name] for name in config if name != "llm_config"}}
    sounds = Section(config, where).section("sound_config")
    if sounds is None:
        return config
    own = {name: value for name, value in sounds.values.items() if name != "model_type"}  # which transformers lacks
    return {**{name: config[name] for name in config if name != "sound_config"}, "audio_config": own}
