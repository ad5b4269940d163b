"""The KV caches of all layers, and what moves in them between forward passes."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor

from octavo.core.step import BlockCopy, BlockOps
from octavo.devices.cpu.attention import Runtime
from octavo.ops.memory import zeroed
from octavo.ops.pages import release


class CacheEngine:
    """One cache per layer on the device, and the swap space that mirrors it in host memory, made when first used.

    Block 0 is the null block; `num_blocks` and `num_host_blocks` count the usable ones, whose ids start at 1. The
    blocks of a cache are its dimension 1.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        num_layers: int,
        num_blocks: int,
        num_host_blocks: int,
        dtype: torch.dtype,
        device: torch.device,
        runtime: Runtime | None = None,
    ) -> None:
        assert shape[1] == num_blocks + 1
        self._runtime = runtime
        self.num_blocks = num_blocks
        self.num_host_blocks = num_host_blocks
        self._device = _tier(shape, num_layers, dtype, device)
        self._host: _Tier | None = None

    @property
    def caches(self) -> Sequence[Tensor]:
        """One per layer."""
        return self._device.caches

    def apply(self, ops: BlockOps) -> float:
        """Swap out, swap in, copy: in this order, and within a list in the list's order. Answers the swaps' seconds."""
        swap_s = self._swap(ops) if ops.swap_outs or ops.swap_ins else 0.0
        if ops.copies:
            self._move(self._device, self._device, ops.copies)
        return swap_s

    def release(self, blocks: Sequence[int]) -> None:
        """Give back the memory of device blocks whose content nobody needs, as far as it is whole large pages."""
        first = self.caches[0]
        if first.device.type != "cpu":
            return
        block_bytes = first.stride(1) * first.element_size()
        for start, count in _runs(sorted(blocks)):
            for plane in self._device.planes.tolist():
                release(plane + start * block_bytes, count * block_bytes)

    def _swap(self, ops: BlockOps) -> float:
        host = self._host_tier()  # making it is no part of moving
        began = time.perf_counter()
        if ops.swap_outs:
            self._move(self._device, host, ops.swap_outs)
        if ops.swap_ins:
            self._move(host, self._device, ops.swap_ins)
        return time.perf_counter() - began

    def _move(self, sources: _Tier, targets: _Tier, copies: Sequence[BlockCopy]) -> None:
        """Copy blocks in all layers: in one call where there are compiled kernels."""
        if self._runtime is None:
            _move_by_torch(sources.caches, targets.caches, copies)
        else:
            _move_by_kernel(self._runtime, sources, targets, copies)

    def _host_tier(self) -> _Tier:
        if self._host is None:
            assert self.num_host_blocks > 0, "a step swaps, but there is no swap space"
            first = self.caches[0]
            shape = (first.shape[0], self.num_host_blocks + 1, *first.shape[2:])
            self._host = _tier(shape, len(self.caches), first.dtype)
        return self._host


class _Tier(NamedTuple):
    """The caches of all layers in one kind of memory. `planes`, int64: where blocks lie one after the other."""

    caches: Sequence[Tensor]
    planes: Tensor


def _runs(blocks: Iterable[int]) -> Iterator[tuple[int, int]]:
    """(first block, how many) of each run of ascending numbers without a gap."""
    for _, run in groupby(enumerate(blocks), lambda pair: pair[1] - pair[0]):
        members = [block for _, block in run]
        yield members[0], len(members)


def _tier(shape: tuple[int, ...], num_layers: int, dtype: torch.dtype, device: torch.device | str = "cpu") -> _Tier:
    caches = tuple(zeroed(shape, dtype, device) for _ in range(num_layers))
    assert all(cache.is_contiguous() for cache in caches)
    return _Tier(caches, torch.tensor([plane.data_ptr() for cache in caches for plane in cache]))


def _move_by_kernel(runtime: Runtime, sources: _Tier, targets: _Tier, copies: Sequence[BlockCopy]) -> None:
    first = sources.caches[0]
    block_bytes = first.stride(1) * first.element_size()
    pairs = torch.tensor([(copy.source, copy.target) for copy in copies])
    from_planes, to_planes = sources.planes, targets.planes
    runtime.cpu.copy_blocks(
        from_planes.data_ptr(), to_planes.data_ptr(), pairs.data_ptr(), len(from_planes), len(copies), block_bytes
    )


def _move_by_torch(sources: Sequence[Tensor], targets: Sequence[Tensor], copies: Sequence[BlockCopy]) -> None:
    for group in _independent(copies):
        source_ids = torch.tensor([copy.source for copy in group])
        target_ids = torch.tensor([copy.target for copy in group])
        for source, target in zip(sources, targets, strict=True):
            moved = source.index_select(1, source_ids.to(source.device)).to(target.device)
            target.index_copy_(1, target_ids.to(target.device), moved)


def _independent(copies: Sequence[BlockCopy]) -> Iterator[list[BlockCopy]]:
    """Cut a list where a copy reads or overwrites what an earlier one of the same group has written."""
    group: list[BlockCopy] = []
    written: set[int] = set()
    for copy in copies:
        if copy.source in written or copy.target in written:
            yield group
            group, written = [], set()
        group.append(copy)
        written.add(copy.target)
    if group:
        yield group
