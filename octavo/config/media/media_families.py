"""The families of models that read images, videos or sounds, by architecture."""

from __future__ import annotations

from typing import Final

from octavo.config.media.image_families import IMAGE_FAMILIES
from octavo.config.media.media_family import MediaFamily
from octavo.config.media.sound_families import SOUND_FAMILIES

_TEXT_ALONE: Final = (
    MediaFamily(("InklingForConditionalGeneration",)),
    MediaFamily(("KimiK3ForConditionalGeneration",)),
    MediaFamily(("MiMoV2OmniForCausalLM",), text={"mimovl": "mimov2"}),
    MediaFamily(("MiniCPMV4_7ForConditionalGeneration",)),
    MediaFamily(("Qwen4ExpForConditionalGeneration",)),
    MediaFamily(("Step3VLForConditionalGeneration",), text={"step3": "step3text"}),
)
"""Families whose text alone is read: their images and sounds are not."""
FAMILIES: Final = (*IMAGE_FAMILIES, *SOUND_FAMILIES, *_TEXT_ALONE)
BY_ARCHITECTURE: Final = {name: family for family in FAMILIES for name in family.architectures}
_BY_RELEASE: Final = BY_ARCHITECTURE | {name: family for family in FAMILIES for name in family.released}
_NONE: Final = MediaFamily()


def media_family(architecture: str) -> MediaFamily:
    """Return the row of an architecture; one without anything for a model of text alone."""
    return BY_ARCHITECTURE.get(architecture, _NONE)


def family_of_release(architecture: str) -> MediaFamily:
    """Return the row of the architecture in a config that may be in the layout of a release; as `media_family`."""
    return _BY_RELEASE.get(architecture, _NONE)
