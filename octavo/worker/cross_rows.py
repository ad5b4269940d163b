"""The slots at which the tokens of a step read the encoder's output of their sequences, and at which it is written."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from octavo.attention.metadata import AttentionMetadata
from octavo.core.arithmetic import num_blocks_for
from octavo.worker.block_table import BlockTables


class CrossRows:
    """The cache group whose blocks hold `num_encoded` vectors of each sequence.

    Every token is a row of its own that sees all of them: so attention needs no other mask, and a token's bits do not
    depend on how a prompt is cut.
    """

    def __init__(
        self, tables: BlockTables, num_encoded: int, block_size: int, max_num_tokens: int, device: torch.device
    ) -> None:
        self._tables = tables
        self._block_size = block_size
        self._num_encoded = num_encoded
        self._device = device
        self._width = num_blocks_for(num_encoded, block_size)
        self._query_starts = torch.arange(max_num_tokens + 1, dtype=torch.int32, device=device)
        self._lengths = torch.full((max_num_tokens,), num_encoded, dtype=torch.int32, device=device)
        self._block_tables = torch.zeros((64, self._width), dtype=torch.int32)
        self._no_slots = torch.zeros(0, dtype=torch.int64, device=device)

    def read(self, line_of_token: NDArray[np.int64]) -> AttentionMetadata:
        """Return the metadata for reads. Its tensors keep their addresses until a step has more tokens than before."""
        num_tokens = len(line_of_token)
        if num_tokens > len(self._block_tables):
            self._block_tables = torch.zeros((2 * num_tokens, self._width), dtype=torch.int32)
        block_tables = self._block_tables[:num_tokens]
        block_tables.numpy()[:] = self._tables.leading(line_of_token, self._width)
        return AttentionMetadata(
            query_starts=self._query_starts[: num_tokens + 1],
            sequence_lengths=self._lengths[:num_tokens],
            block_tables=block_tables.to(self._device, non_blocking=True),
            slot_mapping=self._no_slots,
            block_size=self._block_size,
            query_lengths=(1,) * num_tokens,
            lengths=(self._num_encoded,) * num_tokens,
        )

    def written(self, line: int) -> AttentionMetadata:
        """Return the metadata for writing the vectors of the sequence in this line."""
        blocks = self._tables.leading(np.array([line]), self._width)[0].astype(np.int64)
        slots = (blocks[:, None] * self._block_size + np.arange(self._block_size)).reshape(-1)[: self._num_encoded]
        return AttentionMetadata.of_slots(torch.from_numpy(slots).to(self._device, non_blocking=True), self._block_size)
