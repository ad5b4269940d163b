"""From a prompt with markers and its images to the tokens and arrays that the workers read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from octavo.config.checkpoint import Checkpoint
from octavo.config.section import Section
from octavo.core.media import MediaInput, TypedArray, digest_of
from octavo.errors import CheckpointError, ConfigError, InvalidRequest
from octavo.multimodal.families import FAMILIES, Context, first_positive
from octavo.multimodal.images import decoded

if TYPE_CHECKING:
    from numpy.typing import NDArray

_MOST_LINES: Final = 31
"""Line breaks that tokens of several are looked for with."""


class ImagePrompts:
    """Writes the images of prompts out. Safe to use from several threads."""

    def __init__(
        self, checkpoint: Checkpoint, settings: Mapping[str, Any], encode: Callable[[str], list[int]], limit: int
    ) -> None:
        """settings: of the image processor. encode: returns the ids of a text. limit: images of one prompt.

        Raises CheckpointError for settings that do not fit.
        """
        self.family = FAMILIES[checkpoint.architecture]
        self._limit = limit
        config = Section(checkpoint.stored, checkpoint.where)
        self._context = Context(config, settings, encode)
        self._marker, self._token = (first_positive(config, keys) for keys in (self.family.marker, self.family.token))
        self._path, self._settings = checkpoint.path, settings
        self._processor: Any = None

    def expand(self, token_ids: Sequence[int], given: Any) -> tuple[list[int], tuple[MediaInput, ...]]:
        """Return a prompt's tokens with each marker written out, and what the markers stand for.

        given: an image or a list of images. Raises InvalidRequest.
        """
        images = list(given) if isinstance(given, list | tuple) else [given]
        num_markers = sum(each == self._marker for each in token_ids)
        if len(images) != num_markers:
            raise InvalidRequest(
                f"the prompt has {_count(num_markers, 'placeholder')} for images, but {_count(len(images), 'image')} "
                "came with it; write one placeholder for each image",
                field="multi_modal_data",
            )
        if len(images) > self._limit:
            raise InvalidRequest(
                f"the prompt has {len(images)} images, must have at most {self._limit} (limit_mm_per_prompt)",
                field="multi_modal_data",
            )
        written: list[int] = []
        media: list[MediaInput] = []
        waiting, is_behind = iter(images), False
        for token_id in token_ids:
            if token_id == self._marker:
                tokens, made = self._image(next(waiting), written)
                written += tokens
                media.append(made)
            else:
                written += self._with_lines(written, [token_id]) if is_behind else [token_id]
            is_behind = token_id == self._marker
        return written, tuple(media)

    @cached_property
    def _lines(self) -> dict[int, int]:
        """How many line breaks a token is, of those that are joined."""
        if not self.family.joins_lines:
            return {}
        tokens = [self._context.encode("\n" * count) for count in range(1, 1 + _MOST_LINES)]
        return {ids[0]: count for count, ids in enumerate(tokens, 1) if len(ids) == 1}

    def _with_lines(self, written: list[int], tokens: list[int]) -> list[int]:
        """Return tokens behind `written`, whose last line breaks are removed where they are joined with theirs."""
        count, num_tail, num_head = 0, 0, 0
        while num_tail < len(written) and written[-1 - num_tail] in self._lines:
            count += self._lines[written[-1 - num_tail]]
            num_tail += 1
        while num_head < len(tokens) and tokens[num_head] in self._lines:
            count += self._lines[tokens[num_head]]
            num_head += 1
        if not num_tail or not num_head:
            return tokens
        del written[len(written) - num_tail :]
        return [*self._context.encode("\n" * count), *tokens[num_head:]]

    def _image(self, image: Any, written: list[int]) -> tuple[list[int], MediaInput]:
        """Return what is written of an image behind `written`, which loses line breaks that are joined with its own."""
        made = self.arrays(decoded(image))
        tokens = self._with_lines(written, self.family.tokens(self._context, self._token, made))
        offset = len(written)
        arrays = {name: _typed(made[name]) for name in self.family.reads if name in made}
        spans = tuple(_spans(tokens, self._token, offset))
        num_embeddings = sum(length for _, length in spans)
        digest = digest_of(arrays)
        grid = None if self.family.grid is None else self.family.grid(self._context, made)
        is_whole = self.family.is_whole(self._context.config)
        return tokens, MediaInput("image", digest, spans, num_embeddings, arrays, is_whole, grid)

    def open(self) -> Any:
        """Return transformers' image processor, made at the first call. Raises CheckpointError or ConfigError."""
        if self._processor is None:
            self._processor = _image_processor(self._path, self._settings)
        return self._processor

    def arrays(self, *images: Any) -> dict[str, NDArray[Any]]:
        """Return what transformers' image processor makes of decoded images."""
        made = self.open()(images=[*images], return_tensors="np", **self.family.options)
        return {name: np.asarray(values) for name, values in made.items()}


def _spans(tokens: Sequence[int], token: int, offset: int) -> Iterator[tuple[int, int]]:
    """Yield (offset, length) of the runs of `token`."""
    for is_token, run in groupby(tokens, lambda each: each == token):
        length = sum(1 for _ in run)
        if is_token:
            yield offset, length
        offset += length


def _typed(array: NDArray[Any]) -> TypedArray:
    kinds: dict[str, Any] = {"f": "float32", "i": "int64", "u": "uint8", "b": "uint8"}
    dtype = kinds[array.dtype.kind]
    return TypedArray(dtype, tuple(array.shape), array.astype(dtype, copy=False).tobytes())


def _count(number: int, word: str) -> str:
    return f"{number} {word}" + "s" * (number != 1)


def _image_processor(path: Path, settings: Mapping[str, Any]) -> Any:
    """Return transformers' image processor of a checkpoint, which computes with Pillow and numpy."""
    try:
        import transformers
    except ImportError as error:
        raise ConfigError("images need transformers: pip install 'octavo[images]'") from error
    name = str(settings["image_processor_type"]).removesuffix("Fast").removesuffix("Pil") + "Pil"
    made = getattr(transformers, name, None)
    if made is None:
        raise CheckpointError(f"{path}: transformers {transformers.__version__} has no image processor {name}")
    try:
        return made(**{key: value for key, value in settings.items() if key != "image_processor_type"})
    except Exception as error:  # whatever it raises is about the settings
        raise CheckpointError(f"{path}: {name} refuses the settings of images: {error}") from error
