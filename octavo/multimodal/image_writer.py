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
    """What a family writes images with. config: the whole config.json. encode: ids of a text. place: images of the
    prompt before this one. path: the checkpoint's folder. num_images: of the prompt."""

    config: Section
    settings: Mapping[str, Any]
    encode: Callable[[str], list[int]]
    place: int = 0
    path: Path = Path()
    num_images: int = 1

    @property
    def vision(self) -> Section:
        """The encoder's part of config.json, or all of it where it has none."""
        return self.config.section("vision_config") or self.config


class ImageWriter(NamedTuple):
    """marker: keys of config.json, of which the first that is there has the id that stands for an image in a prompt
    before it is written out. token: likewise the id of tokens that stand for vectors. tokens: returns what is written
    for one image. reads: arrays that the encoder reads. options: of the image processor. is_whole: returns whether
    tokens of an image attend to each other. grid: returns its rows and columns where positions follow from them.
    joins_lines: line breaks around images become one token with those of the prompt, where there is one. arranged:
    returns a prompt as those of the training were, from (context, marker, tokens). word: the text of the marker, where
    config.json does not have its id, with {} for the number of an image, from 1; texts have it replaced by that of
    `token` where it is several tokens. others: returns further tokens that stand for vectors. token_word: the text of
    that token, where config.json lacks its id. num_vectors: returns how many an image becomes where layers read them
    through caches: then its tokens are none of them. is_apart, num_before: of its images, as in `MediaInput`.
    is_alone: an image is a prompt of its own. most_cut: where a prompt has more images, the processor is told to cut
    none of them (`is_cut`); None to tell it nothing."""

    tokens: Callable[[Context, int, Arrays], list[int]]
    reads: tuple[str, ...] = ("pixel_values",)
    options: Mapping[str, Any] = {}
    marker: tuple[str, ...] = ("image_token_index", "image_token_id")
    token: tuple[str, ...] = ("image_token_index", "image_token_id")
    is_whole: Callable[[Section], bool] = lambda config: False
    grid: Callable[[Context, Arrays], tuple[int, int]] | None = None
    joins_lines: bool = False
    arranged: Callable[[Context, int, Sequence[int]], list[int]] | None = None
    word: str | None = None
    others: Callable[[Section], list[int]] = lambda config: []
    token_word: str | None = None
    num_vectors: Callable[[Context, Arrays], int] | None = None
    is_apart: bool = False
    num_before: int = 0
    is_alone: bool = False
    most_cut: int | None = None


def first_positive(config: Section, keys: Sequence[str]) -> int:
    """Return the value of the first key that is there. Raises CheckpointError for no positive integer."""
    found = next((key for key in keys if config.values.get(key) is not None), keys[0])
    return config.positive(found)
