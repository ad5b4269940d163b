"""The description of how a family writes images into prompts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from numpy.typing import NDArray

from octavo.config.section import Section

Arrays = Mapping[str, NDArray[Any]]
"""What the image processor of a family returns for one image."""


class Context(NamedTuple):
    """What a family writes an image with."""

    config: Section
    """The whole config.json."""
    settings: Mapping[str, Any]
    """Settings of the image processor."""
    encode: Callable[[str], list[int]]
    """Returns the ids of a text."""
    place: int = 0
    """Number of images, or of videos for a video, of the prompt before this one."""
    path: Path = Path()
    """The checkpoint's folder."""
    num_images: int = 1
    """Number of images of the prompt."""

    @property
    def vision(self) -> Section:
        """The encoder's part of config.json, or all of it where it has none."""
        return self.config.section("vision_config") or self.config


class ImageWriter(NamedTuple):
    """How a family writes an image into a prompt, and what its encoder reads."""

    tokens: Callable[[Context, int, Arrays], list[int]]
    """Returns the tokens that are written for one image."""
    reads: tuple[str, ...] = ("pixel_values",)
    """Names of the arrays that the encoder reads."""
    options: Mapping[str, Any] = {}
    """Options of the image processor."""
    marker: tuple[str, ...] = ("image_token_index", "image_token_id")
    """Keys of config.json: the first one present has the id that stands for a whole image in a prompt."""
    token: tuple[str, ...] = ("image_token_index", "image_token_id")
    """Keys of config.json: the first one present has the id that stands for one vector of an image."""
    is_whole: Callable[[Section], bool] = lambda config: False
    """Returns whether the tokens of an image attend to each other."""
    are_marks_seen: bool = False
    """All tokens that are written for an image attend to each other, those between vectors too."""
    most: int | None = None
    """Most images of a prompt; None for any number."""
    grid: Callable[[Context, Arrays], tuple[int, int]] | None = None
    """Returns the rows and columns of an image, where positions follow from them."""
    joins_lines: bool = False
    """Line breaks beside an image and those of the prompt become one token, if the tokenizer has one."""
    arranged: Callable[[Context, int, Sequence[int]], list[int]] | None = None
    """Returns a prompt arranged as in training, given (context, marker, tokens)."""
    word: str | None = None
    """The text of the marker, where config.json lacks its id, with {} for the number of an image, from 1. Where it is
    several tokens, the text of `token` replaces it in texts."""
    others: Callable[[Section], list[int]] = lambda config: []
    """Returns further tokens that stand for vectors."""
    token_word: str | None = None
    """The text of `token`, where config.json lacks its id."""
    num_vectors: Callable[[Context, Arrays], int] | None = None
    """Returns the number of vectors of an image that layers read through caches: none of its tokens stands for one."""
    is_apart: bool = False
    """As in `MediaInput`."""
    num_before: int = 0
    """As in `MediaInput`."""
    is_alone: bool = False
    """An image is a prompt of its own."""
    most_cut: int | None = None
    """The image processor gets `is_cut`: whether the prompt has at most so many images. None: it does not get it."""


def first_positive(config: Section, keys: Sequence[str]) -> int:
    """Return the value of the first key that is there. Raises CheckpointError for no positive integer."""
    found = next((key for key in keys if config.values.get(key) is not None), keys[0])
    return config.positive(found)
