"""From a prompt with markers and its images to the tokens and arrays that the workers read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from octavo.config.checkpoint import Checkpoint
from octavo.config.section import Section
from octavo.core.media import MediaInput, TypedArray, digest_of
from octavo.errors import CheckpointError, ConfigError, InvalidRequest
from octavo.multimodal.families import FAMILIES, Context
from octavo.multimodal.images import decoded

if TYPE_CHECKING:
    from numpy.typing import NDArray


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
        self._marker, self._token = (_first(config, keys) for keys in (self.family.marker, self.family.token))
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
        waiting = iter(images)
        for token_id in token_ids:
            if token_id == self._marker:
                tokens, made = self._image(next(waiting), len(written))
                written += tokens
                media.append(made)
            else:
                written.append(token_id)
        return written, tuple(media)

    def _image(self, image: Any, offset: int) -> tuple[list[int], MediaInput]:
        made = self.arrays(decoded(image))
        tokens = self.family.tokens(self._context, self._token, made)
        arrays = {name: _typed(made[name]) for name in self.family.reads if name in made}
        spans = tuple(_spans(tokens, self._token, offset))
        num_embeddings = sum(length for _, length in spans)
        digest = digest_of(arrays)
        grid = None if self.family.grid is None else self.family.grid(self._context, made)
        return tokens, MediaInput("image", digest, spans, num_embeddings, arrays, self.family.is_whole, grid)

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


def _first(config: Section, keys: Sequence[str]) -> int:
    found = next((key for key in keys if config.values.get(key) is not None), keys[0])
    return config.positive(found)


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
