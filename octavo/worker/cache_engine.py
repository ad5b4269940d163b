"""The KV caches of all layers, and what moves in them between forward passes."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby

import torch
from torch import Tensor

from octavo.core.step import BlockOps
from octavo.devices.device import CacheTier, Device
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
        device: Device,
    ) -> None:
        assert shape[1] == num_blocks + 1
        self._copy_blocks = device.copy_blocks
        self.num_blocks = num_blocks
        self.num_host_blocks = num_host_blocks
        self._device = _tier(shape, num_layers, dtype, device.torch_device)
        self._host: CacheTier | None = None

    @property
    def caches(self) -> Sequence[Tensor]:
        """One per layer."""
        return self._device.caches

    def apply(self, ops: BlockOps) -> float:
        """Swap out, swap in, copy: in this order, and within a list in the list's order. Returns the seconds of the
        swaps."""
        swap_s = self._swap(ops) if ops.swap_outs or ops.swap_ins else 0.0
        if ops.copies:
            self._copy_blocks(self._device, self._device, ops.copies)
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
            self._copy_blocks(self._device, host, ops.swap_outs)
        if ops.swap_ins:
            self._copy_blocks(host, self._device, ops.swap_ins)
        return time.perf_counter() - began

    def _host_tier(self) -> CacheTier:
        if self._host is None:
            assert self.num_host_blocks > 0, "a step swaps, but there is no swap space"
            first = self.caches[0]
            shape = (first.shape[0], self.num_host_blocks + 1, *first.shape[2:])
            self._host = _tier(shape, len(self.caches), first.dtype)
        return self._host


def _runs(blocks: Iterable[int]) -> Iterator[tuple[int, int]]:
    """(first block, how many) of each run of ascending numbers without a gap."""
    for _, run in groupby(enumerate(blocks), lambda pair: pair[1] - pair[0]):
        members = [block for _, block in run]
        yield members[0], len(members)


def _tier(shape: tuple[int, ...], num_layers: int, dtype: torch.dtype, device: torch.device | str = "cpu") -> CacheTier:
    caches = tuple(zeroed(shape, dtype, device) for _ in range(num_layers))
    assert all(cache.is_contiguous() for cache in caches)
    return CacheTier(caches, torch.tensor([plane.data_ptr() for cache in caches for plane in cache]))
