"""The stores of the tokens of a worker's sequences."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


class TokenStore(Protocol):
    """Holds one line of tokens per sequence; lines and positions are chosen by the caller.

    A device that keeps its store in its own memory can gather what one step drew for the next step without its host.
    """

    def write(self, line: int, first: int, token_ids: Sequence[int]) -> None:
        """Store tokens that the host knows at positions `first`, `first` + 1, … of a line."""

    def copy(self, source: int, target: int, num_tokens: int) -> None:
        """Copy the first tokens of line `source` to line `target`."""

    def gather(self, lines: NDArray[np.int64], positions: NDArray[np.int64], out: Tensor) -> None:
        """Write token `positions[i]` of line `lines[i]` to `out[i]`, int64 [tokens]."""

    def append(self, lines: Sequence[int], positions: Sequence[int], token_ids: Sequence[int]) -> None:
        """Store drawn token i at `positions[i]` of line `lines[i]`."""

    def read(self, line: int, num_tokens: int) -> NDArray[np.int32]:
        """Return the first tokens of a line, on the host; valid until the next change."""

    def on_device(self) -> Tensor:
        """Return all lines, int32 [lines, width], where the device computes; valid until the next change."""


_FEW = 16
"""Up to so many tokens, one assignment for each takes less time than one indexed assignment for all."""


class HostTokenStore:
    """A `TokenStore` in one array of the host, which grows by doubling: a step gathers and appends without a loop."""

    def __init__(self, num_lines: int = 16, width: int = 256) -> None:
        self._tokens = np.zeros((num_lines, width), dtype=np.int32)

    def write(self, line: int, first: int, token_ids: Sequence[int]) -> None:
        end = first + len(token_ids)
        self._reserve(line + 1, end)
        self._tokens[line, first:end] = token_ids

    def copy(self, source: int, target: int, num_tokens: int) -> None:
        self._reserve(target + 1, num_tokens)
        self._tokens[target, :num_tokens] = self._tokens[source, :num_tokens]

    def gather(self, lines: NDArray[np.int64], positions: NDArray[np.int64], out: Tensor) -> None:
        out.numpy()[:] = self._tokens[lines, positions]

    def append(self, lines: Sequence[int], positions: Sequence[int], token_ids: Sequence[int]) -> None:
        self._reserve(0, max(positions) + 1)
        if len(lines) <= _FEW:
            for line, position, token_id in zip(lines, positions, token_ids, strict=True):
                self._tokens[line, position] = token_id
            return
        self._tokens[lines, positions] = token_ids

    def read(self, line: int, num_tokens: int) -> NDArray[np.int32]:
        return self._tokens[line, :num_tokens]

    def on_device(self) -> Tensor:
        return torch.from_numpy(self._tokens)

    def _reserve(self, num_lines: int, width: int) -> None:
        """Make room for so many lines and tokens in each."""
        have_lines, have_width = self._tokens.shape
        if num_lines <= have_lines and width <= have_width:
            return
        # untouched pages of zeros take no memory
        shape = max(have_lines, _power_of_two(num_lines)), max(have_width, _power_of_two(width))
        grown = np.zeros(shape, dtype=np.int32)
        grown[:have_lines, :have_width] = self._tokens
        self._tokens = grown


class DeviceTokenStore(HostTokenStore):
    """A `TokenStore` on a host and on a device beside it. Steps gather tokens on the device, which adds what it draws
    by itself; the host gets those later, by `note`."""

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
        out.copy_(self.at(self._sent(self.places(lines, positions))))

    def places(self, lines: NDArray[np.int64], positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the indices of these positions of lines in the flattened tensor of `on_device`; reserves room for
        them."""
        self._reserve(0, int(positions.max()) + 1)
        return lines * self._there.shape[1] + positions

    def at(self, places: Tensor) -> Tensor:
        """Return the tokens at places on the device, int64 [tokens]."""
        return self._there.view(-1).index_select(0, places).long()

    def on_device(self) -> Tensor:
        return self._there

    def append(self, lines: Sequence[int], positions: Sequence[int], token_ids: Sequence[int]) -> None:
        self.note(lines, positions, token_ids)
        self._put(lines, positions, self._sent(np.array(token_ids, dtype=np.int32)))

    def append_drawn(self, lines: Sequence[int], positions: Sequence[int], token_ids: Tensor) -> None:
        """Store drawn token i, of int64 [drawn] on the device, at `positions[i]` of line `lines[i]` there."""
        self._put(lines, positions, token_ids.int())

    def note(self, lines: Sequence[int], positions: Sequence[int], token_ids: Sequence[int]) -> None:
        """Store on the host what is on the device already: token i at `positions[i]` of line `lines[i]`."""
        super().append(lines, positions, token_ids)

    def _put(self, lines: Sequence[int], positions: Sequence[int], token_ids: Tensor) -> None:
        places = self.places(np.array(lines, dtype=np.int64), np.array(positions, dtype=np.int64))
        self._there.view(-1).index_copy_(0, self._sent(places), token_ids)

    def _sent(self, array: NDArray[Any]) -> Tensor:
        return torch.from_numpy(array).to(self._device, non_blocking=True)

    def _reserve(self, num_lines: int, width: int) -> None:
        super()._reserve(num_lines, width)
        have_lines, have_width = self._there.shape
        if self._tokens.shape != (have_lines, have_width):
            grown = torch.zeros(self._tokens.shape, dtype=torch.int32, device=self._device)
            grown[:have_lines, :have_width] = self._there
            self._there = grown


def _power_of_two(count: int) -> int:
    """Return the smallest power of two that is not less than `count`; 1 for 0."""
    return 1 << max(0, count - 1).bit_length()
