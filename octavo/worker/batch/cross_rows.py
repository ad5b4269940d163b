"""The slots at which tokens of a step read encoders' outputs of their sequences, and at which these are written."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.attention.metadata import AttentionMetadata
from octavo.core.step import ScheduledSequence
from octavo.worker.batch.block_table import BlockTables
from octavo.worker.batch.packed_arrays import copy_to_device
from octavo.worker.batch.sequence_state import SequenceState


class CrossRows:
    """The cache group whose blocks hold the vectors of encoders' outputs of each sequence.

    Every token that sees some is a row of its own that sees all of these: so attention needs no other mask, and a
    token's bits do not depend on how a prompt is cut.
    """

    def __init__(self, tables: BlockTables, block_size: int, max_num_tokens: int, device: torch.device) -> None:
        self._tables = tables
        self._block_size = block_size
        self._device = device
        self._query_starts = torch.arange(max_num_tokens + 1, dtype=torch.int32, device=device)
        self._lengths = torch.zeros(max_num_tokens, dtype=torch.int32)
        self._block_tables = torch.zeros((64, tables.width), dtype=torch.int32)
        self._no_slots = torch.zeros(0, dtype=torch.int64, device=device)

    def read(
        self, line_of_token: NDArray[np.int64], rows: Iterable[tuple[ScheduledSequence, SequenceState]]
    ) -> tuple[AttentionMetadata, Tensor | None]:
        """Return the metadata for reads, and the flat indices of the tokens that see something, None for all.

        Tensors of the metadata keep their addresses on a CPU until a step has more tokens than before, or a sequence
        more blocks.
        """
        firsts, ends = np.zeros((2, len(line_of_token)), dtype=np.int64)
        place = 0
        for scheduled, state in rows:
            behind = place + scheduled.num_tokens
            for offset, first, end in state.views:
                begin = place + max(0, offset - scheduled.start)
                firsts[begin:behind], ends[begin:behind] = first, end
            place = behind
        (seeing,) = np.nonzero(ends)
        num_seeing, width = len(seeing), self._tables.width
        room = self._block_tables.shape
        if num_seeing > room[0] or width > room[1]:
            self._block_tables = torch.zeros((max(num_seeing, room[0]), width), dtype=torch.int32)
        block_tables, lengths = self._block_tables[:num_seeing], self._lengths[:num_seeing]
        lines, skipped = line_of_token[seeing], firsts[seeing] // self._block_size
        if skipped.any():
            entries = skipped[:, None] + np.arange(width)
            block_tables.numpy()[:] = self._tables.blocks_at(lines[:, None], entries)
        else:
            block_tables.numpy()[:] = self._tables.leading(lines, width)
        lengths.numpy()[:] = (ends - firsts)[seeing]
        metadata = AttentionMetadata(
            query_starts=self._query_starts[: num_seeing + 1],
            sequence_lengths=lengths.to(self._device, non_blocking=True),
            block_tables=block_tables.to(self._device, non_blocking=True),
            slot_mapping=self._no_slots,
            block_size=self._block_size,
            query_lengths=(1,) * num_seeing,
            lengths=lengths.tolist(),
        )
        return metadata, None if num_seeing == len(line_of_token) else copy_to_device([seeing], self._device)[1][0]

    def written(self, line: int, first: int, end: int) -> AttentionMetadata:
        """Return the metadata for writing vectors [first, end) of the sequence in this line."""
        entries, offsets = np.divmod(np.arange(first, end), self._block_size)
        slots = self._tables.blocks_at(np.array([line]), entries).astype(np.int64) * self._block_size + offsets
        return AttentionMetadata.of_slots(torch.from_numpy(slots).to(self._device, non_blocking=True), self._block_size)
