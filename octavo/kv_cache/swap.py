"""The host tier: checks whether sequences can be swapped out and in, and chooses the blocks of both tiers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as SequenceABC

from octavo.core.cache_limits import CacheLimits
from octavo.core.sequence import Sequence
from octavo.core.step import BlockCopy
from octavo.kv_cache.allocation import Shortage, shortage_of_all
from octavo.kv_cache.block_table import BlockTable
from octavo.kv_cache.group_cache import GroupCache


class SwapSpace:
    """Reads the block tables; the block manager writes them."""

    def __init__(self, groups: SequenceABC[GroupCache], limits: CacheLimits, tables: Mapping[int, BlockTable]) -> None:
        self._groups = groups
        self._limits = limits
        self._tables = tables

    def swap_out_shortage(self, sequences: Iterable[Sequence]) -> Shortage | None:
        """Return the host tier's shortage of blocks for the sequences' computed blocks; None if they fit."""
        computed = self._computed(sequences)
        return shortage_of_all(
            [cache.swap_out_shortage(each[cache.index] for each in computed) for cache in self._groups]
        )

    def num_computed_blocks(self, sequences: Iterable[Sequence]) -> tuple[int, int]:
        """Return how many different device blocks hold the computed tokens of these sequences, and their bytes."""
        computed = self._computed(sequences)
        counts = [cache.num_different(each[cache.index] for each in computed) for cache in self._groups]
        num_bytes = sum(cache.block_bytes * count for cache, count in zip(self._groups, counts, strict=True))
        return sum(counts), num_bytes

    def num_bytes(self, copies: Iterable[BlockCopy]) -> int:
        """Return how many bytes these copies move."""
        return sum(self._groups[copy.group].block_bytes for copy in copies)

    def swap_in_shortage(self, sequences: Iterable[Sequence], *, waive_watermark: bool) -> Shortage | None:
        """Return the shortage of device blocks for swapping the sequences in, with the watermark as in
        `BlockManager.shortage`; hits in the device's prefix cache are not used."""
        needed = self.num_blocks_to_swap_in(sequences)
        return shortage_of_all(
            [
                cache.swap_in_shortage(count, waive_watermark=waive_watermark)
                for cache, count in zip(self._groups, needed, strict=True)
            ]
        )

    def num_blocks_to_swap_in(self, sequences: Iterable[Sequence]) -> list[int]:
        """Return for each cache group the device blocks that swapped sequences need to compute their known tokens."""
        needs = [
            (self._tables[each.seq_id].blocks, each.num_computed_tokens, len(each.token_ids)) for each in sequences
        ]
        return [
            cache.num_blocks_to_swap_in((blocks[cache.index], computed, wanted) for blocks, computed, wanted in needs)
            for cache in self._groups
        ]

    def moved(self, sequences: Iterable[Sequence], *, to_host: bool) -> tuple[list[list[list[int]]], list[BlockCopy]]:
        """Allocate blocks on the other tier for the sequences' computed blocks, each once; return their new tables for
        each cache group, and the copies."""
        before = self._computed(sequences)
        after: list[list[list[int]]] = [[] for _ in before]
        copies: list[BlockCopy] = []
        for cache in self._groups:
            places: dict[int, int] = {}
            for old, new in zip(before, after, strict=True):
                new.append(cache.move(old[cache.index], places, to_host=to_host))
            copies += [BlockCopy(source, target, cache.index) for source, target in places.items()]
        return after, copies

    def _computed(self, sequences: Iterable[Sequence]) -> list[list[list[int]]]:
        """Return the blocks of the sequences that hold computed tokens, for each cache group."""
        size, groups, tables = self._limits.block_size, self._groups, self._tables
        return [
            [
                blocks if cache.holds_encoding else blocks[: -(-each.num_computed_tokens // size)]
                for cache, blocks in zip(groups, tables[each.seq_id].blocks, strict=False)
            ]
            for each in sequences
        ]
