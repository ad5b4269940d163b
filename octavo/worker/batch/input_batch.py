"""Builds the flat tensors that a model reads from the rows of a step."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, Final, Generic, NamedTuple, TypeAlias, TypeVar, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.attention.metadata import (
    AttentionMetadata,
    EmbeddingOverride,
    EncoderOutput,
    ModelInput,
    SpanRows,
    TokenKinds,
)
from octavo.core.model_shape import CacheGroup, Encoded, State
from octavo.core.step import ScheduledSequence
from octavo.devices.token_store import DeviceTokenStore
from octavo.worker.batch.cross_rows import CrossRows
from octavo.worker.batch.packed_arrays import copy_to_device
from octavo.worker.batch.rope_positions import rope_positions
from octavo.worker.batch.sequence_state import Sequences, SequenceState, second_start
from octavo.worker.batch.span_rows import rows_without_unseen, span_rows
from octavo.worker.batch.token_kinds import token_kinds


class BatchRow(NamedTuple):
    """A row of the step and the state of its sequence."""

    scheduled: ScheduledSequence
    state: SequenceState

    @property
    def end(self) -> int:
        """Number of the sequence's tokens in the cache after this step, drafts included."""
        return self.scheduled.start + self.scheduled.num_tokens


class Encoding(NamedTuple):
    """states: what an encoder made for a sequence, [vectors, width]. end: behind the last of them, among the vectors
    that the sequence has in caches."""

    state: SequenceState
    end: int
    states: Tensor


Seen = TypeVar("Seen", Tensor, NDArray[Any])
"""Buffers are seen by torch, and by numpy."""


class _Buffers(NamedTuple, Generic[Seen]):
    """The first two int64, the others int32."""

    token_ids: Seen
    positions: Seen
    query_starts: Seen
    sequence_lengths: Seen


class _GroupBuffers(NamedTuple, Generic[Seen]):
    """What differs between cache groups: int64, and int32."""

    slots: Seen
    block_tables: Seen


_Groups: TypeAlias = list[tuple[_GroupBuffers[NDArray[Any]], _GroupBuffers[Tensor]]]


class _Views(NamedTuple):
    arrays: _Buffers[NDArray[Any]]
    tensors: _Buffers[Tensor]
    groups: _Groups


class ImageTokenInputs(NamedTuple):
    """What a model needs to know of tokens of images.

    has_spans: which of them attend to each other, so that no row ends among them. has_kinds: which tokens they are.
    """

    has_spans: bool = True
    has_kinds: bool = False


SPANS_ALONE: Final = ImageTokenInputs()


class InputBatchBuilder:
    """Holds buffers for `max_num_tokens` tokens, so that a step allocates hardly any memory.

    What is copied to another device is read at once, so that nothing waits for what runs there.
    On a CPU the tensors of steps with as many rows lie at the same addresses, until a block table grows beyond all
    before it.
    """

    def __init__(
        self,
        kv_caches: Sequence[Tensor],
        sequences: Sequences,
        groups: Sequence[CacheGroup],
        *,
        block_size: int,
        max_num_tokens: int,
        device: torch.device,
        first_group: int = 0,
        image_tokens: ImageTokenInputs = SPANS_ALONE,
    ) -> None:
        """groups: the cache groups of the model that reads the batches. first_group: the place of their first among
        those of the sequences."""
        self._kv_caches = kv_caches
        self._sequences = sequences
        self._tokens = sequences.tokens
        self._cross = None
        tables = sequences.tables[first_group : first_group + len(groups)]
        if groups and isinstance(groups[-1].keeps, Encoded):
            self._cross = CrossRows(tables.pop(), block_size, max_num_tokens, device)
        self._tables = tables
        self._keeps_states = [isinstance(each.keeps, State) for each in groups]
        self.block_size = block_size
        self._device, self._image_tokens = device, image_tokens
        self.max_num_tokens = max_num_tokens
        self._buffers = _Buffers(
            token_ids=torch.zeros(max_num_tokens, dtype=torch.int64),
            positions=torch.zeros(max_num_tokens, dtype=torch.int64),
            query_starts=torch.zeros(max_num_tokens + 1, dtype=torch.int32),
            sequence_lengths=torch.zeros(max_num_tokens, dtype=torch.int32),
        )
        self._group_buffers = [
            _GroupBuffers(
                slots=torch.zeros(max_num_tokens, dtype=torch.int64),
                block_tables=torch.zeros((64, each.width), dtype=torch.int32),
            )
            for each in tables
        ]
        self._decode_views: dict[int, _Views] = {}

    def leading_blocks(self, line: int, count: int) -> list[int]:
        """Return the first `count` blocks of a line in the first cache group; 0 for those that it does not have."""
        table = self._tables[0]
        found: list[int] = table.leading(np.array([line]), min(count, table.width))[0].tolist()
        return found

    def build(
        self,
        rows: Sequence[BatchRow],
        encoded: Sequence[Encoding] = (),
        embeddings: EmbeddingOverride | None = None,
        *,
        num_padding_rows: int = 0,
    ) -> ModelInput:
        """Gather tokens, positions and slots of all rows, one row after the other.

        encoded: what is written in this step. embeddings: vectors in place of those of tokens. num_padding_rows: copies
        of the first row behind all, which read and write block 0 alone.
        """
        rows = [*rows, *[rows[0]] * num_padding_rows] if num_padding_rows else rows
        query_lengths = [scheduled.num_tokens for scheduled, _ in rows]
        lengths = [scheduled.start + scheduled.num_tokens for scheduled, _ in rows]
        num_tokens = sum(query_lengths)
        assert num_tokens <= self.max_num_tokens, "a step has more tokens than max_num_batched_tokens"
        views, tensors, groups = self._views(len(rows), num_tokens)
        lines = np.array([state.line for _, state in rows], dtype=np.int64)
        views.sequence_lengths[:] = lengths
        if num_tokens == len(rows):
            # one token each: a decode step
            views.query_starts[:] = np.arange(num_tokens + 1, dtype=np.int32)
            np.subtract(views.sequence_lengths, 1, out=views.positions)
            line_of_token = lines
        else:
            views.query_starts[0] = 0
            np.cumsum(query_lengths, out=views.query_starts[1:])
            # token i of a row has the place `query_starts[row] + i` in the batch and the position `start + i`
            shifts = views.query_starts[1:] - views.sequence_lengths
            np.subtract(np.arange(num_tokens), np.repeat(shifts, query_lengths), out=views.positions)
            line_of_token = np.repeat(lines, query_lengths)
        if self._device.type == "cpu":
            self._tokens.gather(line_of_token, views.positions, out=tensors.token_ids)
        entries, offsets = np.divmod(views.positions, self.block_size)
        rope = None
        if self._sequences.num_with_grids:  # tokens and slots are found already
            views.positions[:], rope = self._rope_positions(rows)
        for tables, (arrays, _) in zip(self._tables, groups, strict=True):
            np.multiply(tables.blocks_at(line_of_token, entries), self.block_size, out=arrays.slots)
            np.add(arrays.slots, offsets, out=arrays.slots)
            tables.gather(lines, out=arrays.block_tables)
            # what a copy read of the first row, that row may write in the same launch
            arrays.slots[num_tokens - num_padding_rows :] = arrays.block_tables[len(rows) - num_padding_rows :] = 0
        packed = seeing = None
        if self._device.type != "cpu":
            packed, tensors, groups = self._to_device(line_of_token, entries * self.block_size + offsets, views, groups)
        attention = [
            AttentionMetadata(
                *(tensors.query_starts, tensors.sequence_lengths, group.block_tables, group.slots),
                block_size=self.block_size,
                query_lengths=query_lengths,
                lengths=lengths,
                num_guesses=_num_guesses(rows) if self._keeps_states[number] else (),
            )
            for number, (_, group) in enumerate(groups)
        ]
        if self._cross is not None:
            cross, seeing = self._cross.read(line_of_token, rows)
            attention.append(cross)
        if has_unseen := self._sequences.num_with_unseen > 0:
            attention = rows_without_unseen(rows, attention)
        return ModelInput(
            *(tensors.token_ids, tensors.positions, attention, self._kv_caches),
            rope_positions=rope,
            embeddings=embeddings,
            spans=self._spans(rows, attention),
            adapter_of_token=self._adapters(rows, query_lengths) if self._sequences.num_adapted else None,
            kinds=self._kinds(rows),
            token_types=self._token_types(rows, query_lengths, views.positions) if self._sequences.num_pairs else None,
            seeing=seeing,
            encoded=self._encoder_outputs(encoded) if encoded else (),
            packed=None if has_unseen or self._cross is not None else packed,
        )

    def _kinds(self, rows: Sequence[BatchRow]) -> TokenKinds | None:
        """Return which tokens are of images; None where there are no images, or the model need not know."""
        has_kinds = self._image_tokens.has_kinds and self._sequences.num_with_grids > 0
        return token_kinds(rows, self._device) if has_kinds else None

    def _spans(self, rows: Sequence[BatchRow], attention: Sequence[AttentionMetadata]) -> SpanRows | None:
        """Return the tokens that attend to each other; None where there are none, or the model needs
        none."""
        has_spans = self._image_tokens.has_spans and self._sequences.num_with_spans > 0
        return span_rows(rows, attention[: len(self._tables)]) if has_spans else None

    def _encoder_outputs(self, encoded: Sequence[Encoding]) -> Sequence[EncoderOutput]:
        """Return what encoders made for sequences, with its places in the cache that layers read it from."""
        if self._cross is None:
            return ()
        return [
            EncoderOutput(
                each.states,
                self._cross.written(each.state.line, each.end - len(each.states), each.end),
                each.state.adapter,
            )
            for each in encoded
        ]

    def _to_device(
        self,
        lines: NDArray[np.int64],
        positions: NDArray[np.int64],
        views: _Buffers[NDArray[Any]],
        groups: _Groups,
    ) -> tuple[Tensor, _Buffers[Tensor], _Groups]:
        """Return what `build` has gathered, on the device, and before it its one memory.

        lines, positions: of the tokens in their store there.
        """
        store, of_groups = cast(DeviceTokenStore, self._tokens), [arrays for arrays, _ in groups]
        arrays = [store.places(lines, positions), *views[1:], *(array for group in of_groups for array in group)]
        packed, (places, *others) = copy_to_device(arrays, self._device)
        buffers = (_GroupBuffers(*others[first : first + 2]) for first in range(3, len(others), 2))
        return packed, _Buffers(store.at(places), *others[:3]), list(zip(of_groups, buffers, strict=True))

    def _adapters(self, rows: Sequence[BatchRow], query_lengths: list[int]) -> Tensor | None:
        """Return the adapter of each token; None where no row has one."""
        adapters = np.array([state.adapter for _, state in rows], dtype=np.int32)
        if not adapters.any():
            return None
        return torch.from_numpy(np.repeat(adapters, query_lengths)).to(self._device, non_blocking=True)

    def _token_types(self, rows: Sequence[BatchRow], query_lengths: list[int], positions: NDArray[np.int64]) -> Tensor:
        """Return 1 for the tokens of the second text of a pair, and 0 for the others."""
        starts = np.repeat([second_start(state) or sys.maxsize for _, state in rows], query_lengths)
        return copy_to_device([(positions >= starts).astype(np.int64)], self._device)[1][0]

    def _rope_positions(self, rows: Sequence[BatchRow]) -> tuple[NDArray[np.int64], Tensor | None]:
        """Return positions of tokens behind images, and where this step has images those of rows and columns too."""
        positions, has_images = rope_positions(rows)
        return positions[0], copy_to_device([positions], self._device)[1][0] if has_images else None

    def _views(self, num_rows: int, num_tokens: int) -> _Views:
        """Return the beginnings of the buffers. Those of decode steps are kept: making them is half of `build`."""
        for index, (tables, buffers) in enumerate(zip(self._tables, self._group_buffers, strict=True)):
            room, width = buffers.block_tables.shape
            if num_rows > room or tables.width > width:
                grown = torch.zeros((max(room, 2 * num_rows), tables.width), dtype=torch.int32)
                self._group_buffers[index] = buffers._replace(block_tables=grown)
                self._decode_views.clear()
        if num_rows == num_tokens and num_rows in self._decode_views:
            return self._decode_views[num_rows]
        sizes = (num_tokens, num_tokens, num_rows + 1, num_rows)
        tensors = _Buffers(*(buffer[:size] for buffer, size in zip(self._buffers, sizes, strict=True)))
        groups = [_GroupBuffers(each.slots[:num_tokens], each.block_tables[:num_rows]) for each in self._group_buffers]
        views = _Views(
            _Buffers(*(tensor.numpy() for tensor in tensors)),
            tensors,
            [(_GroupBuffers(each.slots.numpy(), each.block_tables.numpy()), each) for each in groups],
        )
        if num_rows == num_tokens:
            self._decode_views[num_rows] = views
        return views


def _num_guesses(rows: Sequence[BatchRow]) -> Sequence[int]:
    """Return the guesses of each row; nothing where no row has any."""
    counts = [len(scheduled.drafts) for scheduled, _ in rows]
    return counts if any(counts) else ()
