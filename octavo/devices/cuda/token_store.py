"""The tokens of sequences on the GPU, and on the host those that it knows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.devices.cuda.runtime import to_device
from octavo.devices.token_store import HostTokenStore


class CudaTokenStore(HostTokenStore):
    """A `TokenStore` on host and device. Steps gather tokens on the device, where drawn tokens are stored first."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device
        self._there = torch.zeros(self._tokens.shape, dtype=torch.int32, device=device)

    def write(self, line: int, first: int, token_ids: Sequence[int]) -> None:
        super().write(line, first, token_ids)
        end = first + len(token_ids)
        self._there[line, first:end].copy_(torch.from_numpy(self._tokens[line, first:end]), non_blocking=True)

    def copy(self, source: int, target: int, num_tokens: int) -> None:
        super().copy(source, target, num_tokens)
        self._there[target, :num_tokens] = self._there[source, :num_tokens]

    def gather(self, lines: NDArray[np.int64], positions: NDArray[np.int64], out: Tensor) -> None:
        out.copy_(self.at(to_device(self.places(lines, positions), self._device)))

    def places(self, lines: NDArray[np.int64], positions: NDArray[np.int64]) -> NDArray[np.int64]:
        self._reserve(0, int(positions.max()) + 1)
        return lines * self._there.shape[1] + positions

    def at(self, places: Tensor) -> Tensor:
        return self._there.view(-1).index_select(0, places).long()

    def on_device(self) -> Tensor:
        return self._there

    def append(self, lines: Sequence[int], positions: Sequence[int], token_ids: Sequence[int]) -> None:
        super().append(lines, positions, token_ids)
        self._put(lines, positions, to_device(np.array(token_ids, dtype=np.int32), self._device))

    def append_drawn(self, lines: Sequence[int], positions: Sequence[int], token_ids: Tensor) -> None:
        """Store tokens, int64 [drawn] on the device; `note` stores them on the host later."""
        self._put(lines, positions, token_ids.int())

    def note(self, lines: Sequence[int], positions: Sequence[int], token_ids: Sequence[int]) -> None:
        """Store on the host tokens that are on the device already."""
        super().append(lines, positions, token_ids)

    def _put(self, lines: Sequence[int], positions: Sequence[int], token_ids: Tensor) -> None:
        places = self.places(np.array(lines, dtype=np.int64), np.array(positions, dtype=np.int64))
        self._there.view(-1).index_copy_(0, to_device(places, self._device), token_ids)

    def _reserve(self, num_lines: int, width: int) -> None:
        super()._reserve(num_lines, width)
        have_lines, have_width = self._there.shape
        if self._tokens.shape != (have_lines, have_width):
            grown = torch.zeros(self._tokens.shape, dtype=torch.int32, device=self._device)
            grown[:have_lines, :have_width] = self._there
            self._there = grown
