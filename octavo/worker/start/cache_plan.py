"""Divides one budget in bytes into the KV blocks of all cache groups."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from octavo.config.explain import render_bytes
from octavo.config.schema import CacheConfig, SchedulerConfig
from octavo.core.arithmetic import num_blocks_for
from octavo.core.cache_limits import LIVE_STATES, CacheLimits, GroupLimits
from octavo.core.model_shape import CacheGroup, Encoded, State
from octavo.devices.device import DeviceMemory
from octavo.errors import ConfigError


class _Group(NamedTuple):
    """One cache group, without blocks. `needed`: those that a sequence of full length holds at once, the group's share
    of the rest."""

    limits: GroupLimits
    needed: int


_SNAPSHOTS: Final = 2
"""Snapshots of states for which each sequence has room: that of its prompt, and one where it parts from others."""


class CacheDivision:
    """Divides bytes so that each group has blocks for as many sequences of full length as the others.

    Numbers of blocks are those of the group that needs most; `blocks_of` returns those of the others beside it.
    layer_block_bytes: of a block in one layer of each group.
    """

    def __init__(
        self,
        groups: Sequence[CacheGroup],
        layer_block_bytes: Sequence[int],
        cache: CacheConfig,
        scheduler: SchedulerConfig,
    ) -> None:
        self._cache = cache
        self._scheduler = scheduler
        self._groups = []
        for group, layer_bytes in zip(groups, layer_block_bytes, strict=True):
            is_state = isinstance(group.keeps, State)
            num_encoded = group.keeps.most_vectors(cache.block_size) if isinstance(group.keeps, Encoded) else 0
            limits = GroupLimits(
                num_blocks=0,
                block_bytes=len(group.layers) * layer_bytes,
                window=group.window,
                max_live_tokens=LIVE_STATES if is_state else num_encoded or scheduler.max_live_tokens(group.window),
                is_state=is_state,
                num_encoded=num_encoded,
            )
            needed = limits.max_blocks(scheduler.max_model_len, 1 + scheduler.num_lookahead_slots, 1, cache.block_size)
            self._groups.append(_Group(limits, needed + _SNAPSHOTS if is_state else needed))
        self._needed = max(group.needed for group in self._groups)
        self._null_bytes = sum(group.limits.block_bytes for group in self._groups)

    def blocks_of(self, num_blocks: int) -> list[int]:
        """Return the usable blocks of each group where the one that needs most has `num_blocks`."""
        return [-(-num_blocks * group.needed // self._needed) for group in self._groups]

    def num_bytes(self, num_blocks: int) -> int:
        """Return the bytes of all groups, a null block of each included; 0 for no blocks."""
        each = zip(self.blocks_of(num_blocks), self._groups, strict=True)
        return sum((count + 1) * group.limits.block_bytes for count, group in each) if num_blocks > 0 else 0

    def most_blocks(self, num_bytes: int) -> int:
        """Return the most blocks that fit into `num_bytes` beside the null blocks; 0 or less where none does."""
        needed_bytes = sum(group.needed * group.limits.block_bytes for group in self._groups)
        most = (num_bytes - self._null_bytes) * self._needed // needed_bytes
        while most > 0 and self.num_bytes(most) > num_bytes:
            most -= 1  # blocks of the smaller groups are rounded up
        return most

    def most_tokens(self, num_bytes: int, most_kv_bytes: int | None) -> int | None:
        """Return how many tokens of one sequence `num_bytes` hold at most, whatever else takes memory; None where no
        group keeps all tokens."""
        groups = [group.limits for group in self._groups]
        block_bytes = sum(group.block_bytes for group in groups if group.max_live_tokens is None)
        if not block_bytes:
            return None
        kv_bytes = min(num_bytes, self._cache.kv_cache_memory or most_kv_bytes or num_bytes)
        blocks = self._cache.num_gpu_blocks_override or kv_bytes // block_bytes
        return max(1, max(1, blocks) * self._cache.block_size - self._scheduler.num_lookahead_slots)

    def choose(self, most: int, memory: DeviceMemory) -> tuple[int, str]:
        """Return the number of blocks and its reason, where at most `most` fit the memory. Raises ConfigError."""
        cache, scheduler = self._cache, self._scheduler
        wanted = cache.num_gpu_blocks_override
        if wanted is not None:
            if wanted > most:
                raise ConfigError(
                    f"num_gpu_blocks_override {wanted:,} needs {render_bytes(self.num_bytes(wanted))}, but there is "
                    f"room for {most:,} blocks ({render_bytes(self.num_bytes(most))}); lower it, or leave it out"
                )
            return wanted, "num_gpu_blocks_override"
        if cache.kv_cache_memory is not None:
            wanted = self.most_blocks(cache.kv_cache_memory)
            if wanted < 1:
                raise ConfigError(
                    f"kv_cache_memory {render_bytes(cache.kv_cache_memory)} holds no KV block beside the null block; "
                    f"one takes {render_bytes(self._null_bytes)}: give at least {render_bytes(self.num_bytes(1))}"
                )
            if wanted > most:
                raise ConfigError(
                    f"kv_cache_memory {render_bytes(cache.kv_cache_memory)} is more than the "
                    f"{render_bytes(self.num_bytes(most))} that weights and activations leave; lower it, or leave it "
                    "out"
                )
            return wanted, "kv_cache_memory"
        # released blocks are worth keeping where others may find them
        kept = num_blocks_for(scheduler.max_model_len, cache.block_size) if cache.enable_prefix_caching else 0
        choices = [
            (most, "memory left"),
            (
                scheduler.max_num_seqs * max(self._needed, kept),
                f"room for max_num_seqs = {scheduler.max_num_seqs:,} sequences of full length",
            ),
        ]
        if memory.most_kv_bytes is not None:
            because = f"at most {render_bytes(memory.most_kv_bytes)} on a CPU"
            choices.append((self.most_blocks(memory.most_kv_bytes), because))
        return min(((max(1, blocks), because) for blocks, because in choices), key=lambda choice: choice[0])

    def check_holds_one(self, num_blocks: int, because: str) -> None:
        """Raise ConfigError when a sequence of full length does not fit."""
        group = max(self._groups, key=lambda group: group.needed)
        if num_blocks >= group.needed:
            return
        limits, needed_bytes = group.limits, render_bytes(group.needed * group.limits.block_bytes)
        if limits.num_encoded:
            raise ConfigError(
                f"the encoder's output of one request takes {group.needed:,} KV blocks of {self._cache.block_size} "
                f"tokens ({needed_bytes}), there are {num_blocks:,} ({because}); "
                "give the cache more memory"
            )
        shorter_steps = "" if limits.max_live_tokens is None else "lower max_num_batched_tokens, "
        fitting = num_blocks * self._cache.block_size - self._scheduler.num_lookahead_slots
        lower = f"max_model_len to {fitting:,}" if fitting > 0 else "num_lookahead_slots"
        raise ConfigError(
            f"max_model_len {self._scheduler.max_model_len:,} needs {group.needed:,} KV blocks of "
            f"{self._cache.block_size} tokens ({needed_bytes}), there are "
            f"{num_blocks:,} ({because}); lower {lower}, {shorter_steps}or give the cache more memory"
        )

    def limits(self, num_blocks: int, num_host_blocks: int) -> CacheLimits:
        """Return the limits of a cache with so many blocks."""
        empty = CacheLimits(
            block_size=self._cache.block_size,
            groups=tuple(group.limits for group in self._groups),
            num_lookahead=self._scheduler.num_lookahead_slots,
        )
        return empty.with_blocks(self.blocks_of(num_blocks), self.blocks_of(num_host_blocks))
