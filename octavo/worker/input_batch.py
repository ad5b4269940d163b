"""A step's rows as the flat tensors that a model reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.attention.metadata import AttentionMetadata
from octavo.core.step import ScheduledSequence
from octavo.worker.block_table import BlockTables
from octavo.worker.sequence_state import SequenceState


class BatchRow(NamedTuple):
    """A row of the step beside the state of its sequence."""

    scheduled: ScheduledSequence
    state: SequenceState

    @property
    def end(self) -> int:
        """Tokens in the cache after this step."""
        return self.scheduled.start + self.scheduled.num_tokens


@dataclass(frozen=True, slots=True)
class InputBatch:
    """`ModelInput` of one step. Valid until the next one is built: the tensors are views of the builder's buffers."""

    token_ids: Tensor
    positions: Tensor
    attention: AttentionMetadata
    kv_caches: Sequence[Tensor]


class InputBatchBuilder:
    """Holds buffers for `max_num_tokens` tokens, so that a step allocates next to nothing.

    On a CPU the tensors of steps with as many rows lie at the same addresses, until a block table grows beyond all
    before it.
    """

    def __init__(
        self,
        kv_caches: Sequence[Tensor],
        tables: BlockTables,
        *,
        block_size: int,
        max_num_tokens: int,
        device: torch.device,
    ) -> None:
        self._kv_caches = kv_caches
        self._tables = tables
        self._block_size = block_size
        self._device = device
        self._is_cpu = device.type == "cpu"
        self._token_ids = np.zeros(max_num_tokens, dtype=np.int64)
        self._positions = np.zeros(max_num_tokens, dtype=np.int64)
        self._slots = np.zeros(max_num_tokens, dtype=np.int64)
        self._query_starts = np.zeros(max_num_tokens + 1, dtype=np.int32)
        self._lengths = np.zeros(max_num_tokens, dtype=np.int32)
        self._row_tables = np.zeros((64, tables.width), dtype=np.int32)

    def build(self, rows: Sequence[BatchRow]) -> InputBatch:
        """Gather tokens, positions and slots of all rows, one row after the other."""
        num_rows = len(rows)
        query_lengths = [scheduled.num_tokens for scheduled, _ in rows]
        lengths = [scheduled.start + scheduled.num_tokens for scheduled, _ in rows]
        num_tokens = sum(query_lengths)
        assert num_tokens <= len(self._token_ids), "a step has more tokens than max_num_batched_tokens"
        starts = np.array([scheduled.start for scheduled, _ in rows], dtype=np.int64)
        lines = np.array([state.table_line for _, state in rows], dtype=np.int64)
        query_starts, sequence_lengths = self._query_starts[: num_rows + 1], self._lengths[:num_rows]
        np.cumsum(query_lengths, out=query_starts[1:])
        sequence_lengths[:] = lengths
        token_ids, positions, slots = (each[:num_tokens] for each in (self._token_ids, self._positions, self._slots))
        if num_tokens == num_rows:
            # one token each: a decode step
            token_ids[:] = [state.token_buffer[scheduled.start] for scheduled, state in rows]
            positions[:] = starts
            line_of_token = lines
        else:
            for row, first in zip(rows, query_starts.tolist(), strict=False):
                count = row.scheduled.num_tokens
                token_ids[first : first + count] = row.state.token_buffer[row.scheduled.start : row.end]
            np.subtract(np.arange(num_tokens), np.repeat(query_starts[:-1] - starts, query_lengths), out=positions)
            line_of_token = np.repeat(lines, query_lengths)
        entries, offsets = np.divmod(positions, self._block_size)
        np.multiply(self._tables.blocks_at(line_of_token, entries), self._block_size, out=slots)
        slots += offsets
        attention = AttentionMetadata(
            query_starts=self._tensor(query_starts),
            sequence_lengths=self._tensor(sequence_lengths),
            block_tables=self._tensor(self._gather_tables(lines)),
            slot_mapping=self._tensor(slots),
            block_size=self._block_size,
            query_lengths=query_lengths,
            lengths=lengths,
        )
        return InputBatch(self._tensor(token_ids), self._tensor(positions), attention, self._kv_caches)

    def _gather_tables(self, lines: NDArray[np.int64]) -> NDArray[np.int32]:
        num_rows, width = self._row_tables.shape
        if len(lines) > num_rows or self._tables.width > width:
            self._row_tables = np.zeros((max(num_rows, 2 * len(lines)), self._tables.width), dtype=np.int32)
        found = self._row_tables[: len(lines)]
        self._tables.gather(lines, out=found)
        return found

    def _tensor(self, values: np.ndarray) -> Tensor:
        """`values` on the device; on a CPU without a copy."""
        tensor = torch.from_numpy(values)
        return tensor if self._is_cpu else tensor.to(self._device)
