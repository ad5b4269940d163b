"""Swaps of KV blocks between the GPU and pinned memory of the host, on a stream of their own.

Blocks that leave are first copied into a buffer on the GPU, on the stream that computes: they may be overwritten at
once, while the buffer goes to the host. The stream that computes waits for blocks that come back; the host never waits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Final

import torch
from torch import Tensor

from octavo.core.step import BlockCopy

STAGING_BYTES: Final = 64 << 20
"""Bytes of the buffer on the GPU; for a larger block the buffer has its size."""


class Stream:
    """Runs work of a GPU in the order in which it was launched, in parallel with other streams.

    is_side: whether it is a new one, or the one that computes.
    """

    def __init__(self, device: torch.device, *, is_side: bool) -> None:
        self._device = device
        self._side: torch.cuda.Stream | None = None
        if is_side:
            self._side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    @property
    def _stream(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self._device) if self._side is None else self._side

    def run(self, work: Callable[[], object]) -> None:
        """Launch what `work` launches, after the earlier work of this stream."""
        with torch.cuda.stream(self._stream):
            work()

    def wait_for(self, other: Stream) -> None:
        """Make later work of this stream wait for the work that `other` has now."""
        self._stream.wait_stream(other._stream)

    def finish(self) -> None:
        """Wait until all work of this stream is done."""
        self._stream.synchronize()


class Swaps:
    """Swaps of one worker's blocks. A block is all its layers, in one piece."""

    def __init__(self, compute: Stream, side: Stream, device: torch.device, block_bytes: int) -> None:
        """block_bytes: of the largest block."""
        self._compute, self._side = compute, side
        self.most_bytes = max(STAGING_BYTES, block_bytes)
        self._staging = torch.empty(self.most_bytes, dtype=torch.uint8, device=device)

    def move_out(self, blocks: Tensor, host: Tensor, copies: Sequence[BlockCopy]) -> None:
        """Copy blocks [blocks, ...] to blocks of the host, which the next `move_in` may read."""
        sources, targets = _rows(blocks), _rows(host)
        width = sources.shape[1]
        at_once = len(self._staging) // width
        for start in range(0, len(copies), at_once):
            some = copies[start : start + at_once]
            staged = self._staging[: len(some) * width].view(len(some), width)
            source_ids = torch.tensor([each.source for each in some]).to(blocks.device, non_blocking=True)
            self._compute.wait_for(self._side)  # until the buffer is free
            self._compute.run(lambda ids=source_ids, out=staged: out.copy_(sources.index_select(0, ids)))  # type: ignore[misc]
            self._side.wait_for(self._compute)
            self._side.run(lambda some=some, staged=staged: _send(staged, targets, some))  # type: ignore[misc]

    def move_in(self, host: Tensor, blocks: Tensor, copies: Sequence[BlockCopy]) -> None:
        """Copy blocks of the host to blocks of the GPU, before anything that is computed later."""
        sources, targets = _rows(host), _rows(blocks)
        self._side.wait_for(self._compute)  # which may still read what was in the blocks
        self._side.run(lambda: _send((sources[each.source] for each in copies), targets, copies))
        self._compute.wait_for(self._side)


def done_behind(compute: Stream, side: Stream, work: Callable[[], Tensor]) -> Tensor:
    """Run work on `side` after the present work of `compute`, wait for it, and return its result."""
    found: list[Tensor] = []
    side.wait_for(compute)
    side.run(lambda: found.append(work()))
    side.finish()
    return found[0]


def _send(rows: Iterable[Tensor], targets: Tensor, copies: Sequence[BlockCopy]) -> None:
    for row, each in zip(rows, copies, strict=True):
        targets[each.target].copy_(row, non_blocking=True)


def _rows(blocks: Tensor) -> Tensor:
    """Return the bytes of each block, [blocks, bytes]."""
    return blocks.view(len(blocks), -1).view(torch.uint8)
