"""Encodes the images and sounds of prompts; the results, or given vectors, replace embeddings of tokens."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.attention.metadata import EmbeddingOverride
from octavo.core.media import MediaInput, TypedArray
from octavo.core.model_shape import CacheGroup, Encoded
from octavo.core.prompt_embeds import FIELD
from octavo.devices.device import Device
from octavo.errors import CheckpointError, one_line
from octavo.models.decoder import DecoderStack
from octavo.models.encoder import without_layers
from octavo.worker.batch.input_batch import BatchRow, Encoding
from octavo.worker.batch.packed_arrays import copy_to_device

_REMEDY: Final = "sizes in config.json and preprocessor_config.json do not belong together; download both again"
_MOST_ELEMENTS: Final = 1 << 17
"""Most elements of arrays that a whole encoder reads within a fraction of a second."""
Encode = Callable[[str, Mapping[str, Tensor]], Tensor]
"""Makes [vectors, width] of one input of a kind from its arrays by name."""


def encodings_of(
    model: DecoderStack,
    groups: Sequence[CacheGroup],
    device: Device,
    max_embeddings: int,
    given: torch.dtype | None = None,
) -> CrossEncodings | PromptEncodings | None:
    """Return the encodings of a model with these cache groups; None for one that reads only text.

    given: the type of vectors given in place of tokens; None if there are none.
    """

    def encode(kind: str, arrays: Mapping[str, Tensor]) -> Tensor:
        with device.library_threads():
            return model.encode(kind, arrays)

    def outline(kind: str, arrays: Mapping[str, Tensor]) -> Tensor:
        with without_layers(model.get_submodule("encoder")):
            return encode(kind, arrays)

    if (model.replaces_tokens or given is not None) and model.is_first:
        return PromptEncodings(encode, outline, max_embeddings, device.torch_device, given)
    keeps = groups[-1].keeps
    return CrossEncodings(encode, outline, device.torch_device) if isinstance(keeps, Encoded) else None


def kept_encodings_bytes(model: DecoderStack, max_embeddings: int, element_size: int) -> int:
    """Return the most bytes of encodings that are kept for later prompts."""
    if not (model.replaces_tokens and model.is_first):
        return 0
    return max_embeddings * model.encoding_size * element_size


class PromptEncodings:
    """Encodes one input at a time, so that the bits of none depend on others, and keeps results by digest.

    At most `max_embeddings` vectors are kept besides those of unfinished prompts; the least recently used are dropped
    first.
    """

    are_cached = False
    """Whether layers read encoders' outputs through caches."""

    def __init__(
        self,
        encode: Encode,
        outline: Encode,
        max_embeddings: int,
        device: torch.device,
        given: torch.dtype | None = None,
    ) -> None:
        """outline: makes tensors of the same shape, or fails, without the encoder's layers."""
        self._encode, self._outline, self._given = encode, outline, given
        self._max_embeddings = max_embeddings
        self._device = device
        self._kept: OrderedDict[bytes, Tensor] = OrderedDict()
        self.num_kept = 0
        """Number of vectors that are kept."""

    def check(self, media: MediaInput) -> None:
        """Raise CheckpointError if the encoder fails, or makes another number of vectors than a prompt has places."""
        _check(self._encode, self._outline, media, self._device)

    def read(
        self, rows: Sequence[BatchRow], unfinished: Callable[[], Iterable[MediaInput]]
    ) -> tuple[tuple[()], EmbeddingOverride | None]:
        """Return no outputs for caches, and the vectors that rows of this step read, encoded now unless kept.
        unfinished: returns the media that sequences will still read.
        """
        indices: list[NDArray[np.int64]] = []
        values: list[Tensor] = []
        first = 0
        for row in rows:
            if row.state.media:
                for index, part in self._parts(row):
                    indices.append(index + first)
                    values.append(part)
                # the last token is computed again where the form of the next one is not ready
                end = row.end if row.state.params.structured_outputs is None else row.end - 1
                row.state.media = tuple(each for each in row.state.media if each.end > end)
            first += row.scheduled.num_tokens
        if not indices:
            return (), None
        if self.num_kept > self._max_embeddings:
            self._evict({each.digest for each in unfinished()})
        return (), EmbeddingOverride(copy_to_device([np.concatenate(indices)], self._device)[1][0], torch.cat(values))

    def _parts(self, row: BatchRow) -> Iterator[tuple[NDArray[np.int64], Tensor]]:
        """Yield (places in the row, vectors there) for each span that the row has tokens of."""
        start, end = row.scheduled.start, row.end
        for each in row.state.media:
            done = 0
            for offset, length in each.spans:
                begin, stop = max(offset, start), min(offset + length, end)
                if begin < stop:
                    part = slice(begin - offset + done, stop - offset + done)
                    vectors = self._rows(each, part) if each.kind == "embeds" else self._encoded(each)[part]
                    yield np.arange(begin - start, stop - start), vectors
                done += length

    def _rows(self, media: MediaInput, part: slice) -> Tensor:
        """Return some of the given vectors. They are not kept, as each is read once."""
        array = media.arrays[FIELD]
        rows = np.frombuffer(array.data, dtype=np.float32).reshape(array.shape)[part]
        return torch.tensor(rows, device=self._device, dtype=self._given)

    def _encoded(self, media: MediaInput) -> Tensor:
        found = self._kept.get(media.digest)
        if found is None:
            found = self._encode(media.kind, as_tensors(media.arrays, self._device))
            assert len(found) == media.num_embeddings, "an encoder makes another number of vectors than the prompt has"
            self._kept[media.digest] = found
            self.num_kept += len(found)
        self._kept.move_to_end(media.digest)
        return found

    def _evict(self, pinned: set[bytes]) -> None:
        for digest in [each for each in self._kept if each not in pinned]:
            if self.num_kept <= self._max_embeddings:
                return
            self.num_kept -= len(self._kept.pop(digest))


class CrossEncodings:
    """Encodes one input at a time, so that the bits of none depend on others. Equal ones of a step are encoded once."""

    are_cached = True

    def __init__(self, encode: Encode, outline: Encode, device: torch.device) -> None:
        """outline: as `PromptEncodings` takes it."""
        self._encode, self._outline = encode, outline
        self._device = device

    def check(self, media: MediaInput) -> None:
        """Raise like `PromptEncodings.check`."""
        _check(self._encode, self._outline, media, self._device)

    def read(
        self, rows: Sequence[BatchRow], unfinished: Callable[[], Iterable[MediaInput]]
    ) -> tuple[list[Encoding], None]:
        """Return the outputs encoded in this step: all of a sequence, before its first row."""
        made: dict[bytes, Tensor] = {}
        outputs = []
        for _, state in rows:
            for each, view in zip(state.media, state.views if state.media else (), strict=True):
                if each.digest not in made:
                    made[each.digest] = self._encode(each.kind, as_tensors(each.arrays, self._device))
                outputs.append(Encoding(state, view.end, made[each.digest]))
            state.media = ()
        return outputs, None


def _check(encode: Encode, outline: Encode, media: MediaInput, device: torch.device) -> None:
    """Raise as `PromptEncodings.check` does. For a large input the outline suffices, unless it fails too."""
    arrays = as_tensors(media.arrays, device)
    if sum(each.numel() for each in arrays.values()) > _MOST_ELEMENTS:
        with suppress(Exception):  # the encoder itself has the last word
            if len(outline(media.kind, arrays)) == media.num_embeddings:
                return
    try:
        num_made = len(encode(media.kind, arrays))
    except Exception as error:  # whatever it raises is about the sizes of the checkpoint
        raise CheckpointError(f"the encoder fails with a small {media.kind} ({one_line(error)}): {_REMEDY}") from error
    if num_made != media.num_embeddings:
        raise CheckpointError(
            f"the encoder makes {num_made} vectors of a small {media.kind}, for which a prompt has "
            f"{media.num_embeddings} tokens: {_REMEDY}"
        )


def as_tensors(arrays: Mapping[str, TypedArray], device: torch.device) -> dict[str, Tensor]:
    """Return tensors with the content of arrays, by the same names."""
    return {
        name: torch.frombuffer(bytearray(array.data), dtype=getattr(torch, array.dtype)).view(array.shape).to(device)
        for name, array in arrays.items()
    }
