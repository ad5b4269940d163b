"""The image processor of Nemotron 3 Nano Omni as NVIDIA released it, and as transformers has it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

NEMOTRON_OMNI: Final = ("NemotronH_Nano_Omni_Reasoning_V3", "NemotronH_Omni_Reasoning_V3")
"""The architecture of the release, and transformers' name of it."""
NEMOTRON_IMAGES: Final = "NemotronH_Omni_Reasoning_V3ImageProcessor"
_STATED: Final = frozenset({"image_processor_type", "max_num_patches", "norm_mean", "patch_size"})


def nemotron_settings(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of an image processor by transformers' names; those of something else as they are."""
    if not values.keys() & _STATED:
        return dict(values)
    numbers = {f"image_{name}": values.get(f"norm_{name}") for name in ("mean", "std")}
    stated = {name: value for name, value in numbers.items() if value is not None}
    return {**stated, **values, "image_processor_type": NEMOTRON_IMAGES}
