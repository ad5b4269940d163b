"""The KV caches of all layers, and the copies and swaps of their blocks between forward passes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor

from octavo.attention.backend import CacheLayout
from octavo.core.step import BlockCopy, BlockOps
from octavo.devices.device import CacheTier, Device
from octavo.ops.memory import zeroed
from octavo.ops.pages import release


class Arena(NamedTuple):
    """The memory of one cache group: the layers in it, the layout of each layer's cache, and its blocks in the swap
    space."""

    layers: Sequence[int]
    layout: CacheLayout
    num_host_blocks: int = 0


SwapSpace = Callable[[], Sequence[CacheTier | None]]
"""Waits for the host tiers of all cache groups, where they are made at start; raises ConfigError."""


def begin_swap_space(arenas: Sequence[Arena], device: Device) -> SwapSpace:
    """Begin to make the swap space of each cache group that has some, and return a function that waits for it."""
    tiers = [_host_tier(each, device) if each.num_host_blocks and each.layers else None for each in arenas]
    return lambda: [None if each is None else each() for each in tiers]


class CacheEngine:
    """One cache per layer on the device, and the swap space that mirrors it in host memory, made when first used.

    Each cache group has blocks of its own, in each of which all its layers lie side by side: the first use of a block
    takes memory for that block alone. Block 0 is the null block, which is in no count of blocks.
    """

    def __init__(
        self,
        arenas: Sequence[Arena],
        device: Device,
        num_draft_groups: int = 0,
        swap_space: SwapSpace | None = None,
    ) -> None:
        """arenas: of each cache group; together they have every layer, some in several of them. num_draft_groups: how
        many of them, the last ones, are of a draft model, whose layers follow those of the model. swap_space: what was
        begun for these arenas, on a device that pins it; None to begin now."""
        self._arenas, self._device = arenas, device
        if swap_space is None and device.launches_beside_host:
            swap_space = begin_swap_space(arenas, device)
        memories = (zeroed(*_memory_of(each.layout, len(each.layers)), device=device.torch_device) for each in arenas)
        self._tiers = [_tier(each) for each in memories]
        self._swap_space, self._host_tiers = swap_space, list[CacheTier | None]([None] * len(arenas))
        by_place = {
            (layer, place): cache
            for place, (arena, tier) in enumerate(zip(arenas, self._tiers, strict=True))
            for layer, cache in zip(arena.layers, tier.caches, strict=True)
        }
        first = len(arenas) - num_draft_groups
        self.caches: Sequence[Tensor] = [by_place[place] for place in sorted(by_place) if place[1] < first]
        """The caches of each layer of the model, one for each cache group that has the layer."""
        self.draft_caches: Sequence[Tensor] = [by_place[place] for place in sorted(by_place) if place[1] >= first]
        """The caches of each layer of the draft model."""

    @property
    def num_groups(self) -> int:
        """Number of cache groups."""
        return len(self._arenas)

    def wait_for_swap_space(self) -> None:
        """Wait for the swap space that was begun, if any. Raises ConfigError where it cannot be made."""
        if self._swap_space is not None:
            self._host_tiers = list(self._swap_space())

    def apply(self, ops: BlockOps) -> float:
        """Swap out, swap in, copy: in this order, and within a list in the list's order. Returns the seconds of the
        swaps, 0 where they are not known."""
        swap_s = self._swap(ops) if ops.swap_outs or ops.swap_ins else 0.0
        for group, copies in self._by_group(ops.copies):
            self._device.copy_blocks(self._tiers[group], self._tiers[group], copies)
        return swap_s

    def release(self, blocks: Sequence[Sequence[int]]) -> None:
        """Release the memory of device blocks, for each cache group, as far as it is whole large pages of the host."""
        for tier, block_ids in zip(self._tiers, blocks, strict=True):
            first = tier.caches[0] if tier.caches else None
            if first is None or first.device.type != "cpu":
                continue
            size = first.stride(1) * first.element_size()
            for start, count in _runs(sorted(block_ids)):
                release(first.data_ptr() + start * size, count * size)

    def _swap(self, ops: BlockOps) -> float:
        outs, ins = self._by_group(ops.swap_outs), self._by_group(ops.swap_ins)
        hosts = {group: self._host_tier(group) for group, _ in outs + ins}  # making the tiers does not count as moving
        began = time.perf_counter()
        for group, copies in outs:
            self._device.copy_blocks(self._tiers[group], hosts[group], copies)
        for group, copies in ins:
            self._device.copy_blocks(hosts[group], self._tiers[group], copies)
        # the copies are only launched here: how long they take is not known
        return 0.0 if self._device.launches_beside_host else time.perf_counter() - began

    def _by_group(self, copies: Sequence[BlockCopy]) -> list[tuple[int, Sequence[BlockCopy]]]:
        """Return the copies of each cache group that has any, in their order."""
        if not copies:
            return []
        if len(self._arenas) == 1:
            return [(0, copies)]
        groups = [[copy for copy in copies if copy.group == group] for group in range(len(self._arenas))]
        # a pipeline stage may have no layer of a group
        return [(group, each) for group, each in enumerate(groups) if each and self._arenas[group].layers]

    def _host_tier(self, group: int) -> CacheTier:
        if self._host_tiers[group] is None:
            self.wait_for_swap_space()
        tier = self._host_tiers[group]
        if tier is None:
            assert self._arenas[group].num_host_blocks > 0, "a step swaps, but there is no swap space"
            tier = self._host_tiers[group] = _host_tier(self._arenas[group], self._device)()
        return tier


def _host_tier(arena: Arena, device: Device) -> Callable[[], CacheTier]:
    """Begin to make the host tier of a cache group, and return a function that waits for it."""
    layers, (shape, dtype), num_host_blocks = arena
    layout = CacheLayout((shape[0], num_host_blocks + 1, *shape[2:]), dtype)
    memory = device.swap_space(*_memory_of(layout, len(layers)))
    return lambda: _tier(memory())._replace(is_swap_space=True)


def _memory_of(layout: CacheLayout, num_layers: int) -> tuple[tuple[int, ...], torch.dtype]:
    """Return the shape [blocks, layers, planes, ...] and the type of a tier's memory."""
    planes, num_blocks, *block = layout.shape
    return (num_blocks, num_layers, planes, *block), layout.dtype


def _tier(memory: Tensor) -> CacheTier:
    """Return the tier in this memory."""
    caches = tuple(memory[:, layer].transpose(0, 1) for layer in range(memory.shape[1]))
    return CacheTier(caches, torch.tensor([plane.data_ptr() for cache in caches for plane in cache]), memory)


def _runs(blocks: Iterable[int]) -> Iterator[tuple[int, int]]:
    """Yield (first block, how many) of each run of ascending numbers without a gap."""
    for _, run in groupby(enumerate(blocks), lambda pair: pair[1] - pair[0]):
        members = [block for _, block in run]
        yield members[0], len(members)
