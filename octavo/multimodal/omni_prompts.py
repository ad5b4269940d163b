"""Writes images, videos and sounds into the prompts of models that read them all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from octavo.core.media import MediaInput
from octavo.multimodal.image_prompts import ImagePrompts
from octavo.multimodal.sound_prompts import SoundPrompts


class OmniPrompts:
    """Both writers, one after the other. Safe to use from several threads."""

    def __init__(self, images: ImagePrompts, sounds: SoundPrompts) -> None:
        self._images, self.sounds = images, sounds
        self.kinds = images.kinds | sounds.kinds
        """The kinds of inputs that prompts may have."""
        self.marker, self.words = images.marker, {**images.words, **sounds.words}
        """The token that stands for an image before it is written out, and texts that stand for inputs, by kind."""

    def open(self) -> None:
        """Import what reads images and sounds."""
        self._images.open()
        self.sounds.open()

    def expand(self, token_ids: Sequence[int], given: Mapping[str, Any]) -> tuple[list[int], tuple[MediaInput, ...]]:
        """Return a prompt's tokens with each marker written out, and what the markers stand for, in order.

        given: by kind, an input or a list of them. Raises InvalidRequest.
        """
        written, seen = self._images.expand(token_ids, given)
        return self.sounds.expand(written, given, seen)
