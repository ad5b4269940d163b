"""The blocks of one cache group on the device and on the host, and what its layers keep of a sequence.

Tables are plain lists of block ids here; `BlockManager` owns them and keeps those of the groups in step.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from octavo.core.arithmetic import num_blocks_for
from octavo.core.cache_limits import GroupLimits
from octavo.core.sequence import SequenceGroup
from octavo.core.step import BlockCopy
from octavo.kv_cache.allocation import PrefixHit, Shortage
from octavo.kv_cache.block_pool import NULL_BLOCK, BlockPool, CachedBytes, release_table
from octavo.kv_cache.eviction import EVICTIONS
from octavo.kv_cache.retention import retention_of


class GroupCache:
    """The cache group with this index. `watermark` is the share of blocks kept free at admission.

    The host tier holds the blocks of swapped sequences only: nothing there is shared between requests or found by
    content.
    """

    def __init__(
        self,
        index: int,
        limits: GroupLimits,
        block_size: int,
        *,
        watermark: float,
        eviction: str,
        cached_bytes: CachedBytes | None = None,
        num_lookahead: int = 0,
        snapshot_tokens: int = 0,
    ) -> None:
        """num_lookahead: token slots that sequences have beyond their tokens. snapshot_tokens: how far apart the states
        of a sequence are that are to be found later, beside those of its prompt; 0 for none."""
        self.index = index
        self.pool = BlockPool(limits.num_blocks, EVICTIONS[eviction](), cached_bytes, index)
        if cached_bytes is not None:
            cached_bytes.add(self.pool, limits.block_bytes)
        self.host_pool = BlockPool(limits.num_host_blocks)
        self.retention = retention_of(limits, block_size)
        self.holds_encoding = limits.num_encoded > 0
        self.block_bytes = limits.block_bytes
        self.block_size = block_size
        # nothing is written ahead of a state
        self.num_lookahead = 0 if self.retention.is_state else num_lookahead
        self._blocks_between = -(-snapshot_tokens // block_size)
        self._num_watermark_blocks = int(watermark * limits.num_blocks)

    # ---- admission ----

    def num_required_blocks(self, group: SequenceGroup, num_unseen: int = 0) -> int:
        """Return the blocks that a request needs at once for all its known tokens, and the lookahead slots of each
        sequence: the common prefix, from block `num_unseen` on, once, and a tail for each."""
        size, at_once, num_lookahead = self.block_size, self.retention.at_once, self.num_lookahead
        if self.holds_encoding:
            return group.request.num_encoded_blocks(size)
        if group.width > 1 and not group.has_output:
            # the first token of each is written too, unless it is also the last
            tail_tokens = [group.num_prompt_tokens + min(1, group.max_tokens - 1) + num_lookahead] * group.width
        else:
            tail_tokens = [len(sequence.token_ids) + num_lookahead for sequence in group.live]
        if len(tail_tokens) == 1:
            return at_once(num_blocks_for(tail_tokens[0], size) - num_unseen)
        num_shared = max(group.num_prompt_tokens // size, num_unseen)
        tails = sum(at_once(num_blocks_for(tokens, size) - num_shared) for tokens in tail_tokens)
        required = at_once(num_shared - num_unseen) + tails
        return min(required, len(tail_tokens) * at_once(required))

    def shortage(
        self, group: SequenceGroup, hit: PrefixHit, *, waive_watermark: bool, is_returning: bool
    ) -> Shortage | None:
        """Return what the request lacks to have its blocks (see `BlockManager.shortage`)."""
        pool, hit_blocks, num_unseen = self.pool, hit.blocks_of(self.index), hit.num_unseen(self.index)
        required = self.num_required_blocks(group, num_unseen)
        assert required <= pool.num_blocks, "a request that does not fit alone is refused when it arrives"
        # a hit that has users takes no free block; one that is only cached takes one, like a new block
        from_free = required - (len(hit_blocks) - num_unseen) + sum(map(pool.is_cached, hit_blocks))
        if hit.sources and not self.holds_encoding:
            # the source of a copy stays until the step is planned
            from_free += pool.is_cached(hit.sources[self.index])
        kept = 0 if waive_watermark else max(self._num_watermark_blocks, from_free if is_returning else 0)
        return _shortage(from_free, pool, kept)

    def allocate(self, num_tokens: int, hit: PrefixHit, num_fetched: int) -> list[int]:
        """Return a table for `num_tokens` tokens, or for encoders' outputs, the cached blocks first and behind them
        `num_fetched` that are fetched; where later steps release blocks, no more than are held at once, and no states:
        the table grows with the steps."""
        hit_blocks = hit.blocks_of(self.index)
        num_tokens = hit.num_encoded_blocks * self.block_size if self.holds_encoding else num_tokens
        num_unseen = hit_blocks.count(NULL_BLOCK)
        if num_fetched:
            # the last block keeps what the token after it reads: so others find the prefix up to there
            num_whole = min(len(hit_blocks) + num_fetched, (num_tokens - 1) // self.block_size)
            num_unseen = self.retention.num_unseen_blocks(num_whole * self.block_size)
        table = [NULL_BLOCK] * num_unseen
        for block in hit_blocks[num_unseen:]:
            self.pool.acquire(block)
            self.pool.note_hit(block)
            table.append(block)
        num_live = self.retention.at_once(num_blocks_for(num_tokens, self.block_size) - num_unseen)
        end = len(hit_blocks) + num_fetched if self.retention.is_state else num_unseen + num_live
        table.extend(self.pool.allocate() for _ in range(end - len(table)))
        return table

    def first_sent(self, num_blocks: int) -> int:
        """Return the first of a prefix's blocks that another engine needs to go on: with the last token of the prefix,
        or, where it has a state, behind it."""
        return self.retention.num_unseen_blocks((num_blocks - (not self.retention.is_state)) * self.block_size)

    # ---- growth ----

    def num_blocks_to_write(self, end: int, num_guesses: int) -> int:
        """Return how many blocks a sequence has whose tokens before `end`, guesses behind them and lookahead slots are
        written. No state is kept behind a guess."""
        last = end if self.retention.is_state else end + num_guesses + self.num_lookahead
        return -(-last // self.block_size)

    def has_room_to_write(self, table: list[int], first: int, num_blocks: int) -> bool:
        """Return whether there are free blocks to make entries from `first` on writable, `num_blocks` in all."""
        num_shared = sum(map(self.pool.is_shared, table[first:]))
        num_new = max(0, num_blocks - len(table))
        if self.retention.is_state:
            num_new = min(1, num_new)
        return num_new + num_shared <= self.pool.num_free_blocks

    def is_snapshot(self, entry: int, snapshots: Sequence[int]) -> bool:
        """Return whether the state in this entry of a sequence's table is to be found later. `snapshots`: see
        `BlockTable`."""
        number = entry + 1
        return number in snapshots or bool(self._blocks_between and number % self._blocks_between == 0)

    def make_writable(
        self, table: list[int], first: int, num_blocks: int, snapshots: Sequence[int] | None, num_kept: int
    ) -> tuple[int, list[BlockCopy]]:
        """Replace shared blocks from entry `first` on by copies, and append new ones up to `num_blocks`; return the
        first entry that changed, and the copies.

        Of states, only the last one has a block, and those that are to be found later (None: none are) as long as more
        than `num_kept` blocks are free: so they take none that other sequences need in this step.
        """
        first_changed, copies, pool = len(table), [], self.pool
        for i in range(first, len(table)):
            if pool.is_shared(table[i]):
                source, table[i] = table[i], pool.allocate()
                pool.release(source)
                copies.append(BlockCopy(source, table[i], self.index))
                first_changed = min(first_changed, i)
        for i in range(len(table), num_blocks):
            is_written = not self.retention.is_state or i + 1 == num_blocks
            if not is_written and snapshots is not None and pool.num_free_blocks > num_kept + 1:
                is_written = self.is_snapshot(i, snapshots)
            table.append(pool.allocate() if is_written else NULL_BLOCK)
        return first_changed, copies

    def share(self, table: list[int]) -> list[int]:
        """Return a second table with the same blocks."""
        self.pool.share(table[table.count(NULL_BLOCK) :])
        return list(table)

    def release_unseen(self, table: list[int], first: int, position: int) -> int:
        """Release the blocks that no token from `position` on reads; their entries become null. Return how many leading
        entries are null, of which `first` were so before.

        What leaves a window is evicted before other blocks: it is found only where a prompt parts from this one there.
        """
        end = self.retention.num_unseen_blocks(position)
        # the head first: hits need the blocks next to where they end, so those nearest to the window are worth most
        for i in range(first, end):
            if table[i] != NULL_BLOCK:
                self.pool.release(table[i], is_spare=not self.retention.is_state)
                table[i] = NULL_BLOCK
        return max(first, end)

    def num_leading_shared(self, tables: list[list[int]]) -> int:
        """Return how many leading blocks of the first table sequences outside `tables` use as well; null blocks are
        skipped."""
        count = 0
        for place, block in enumerate(tables[0]):
            if block == NULL_BLOCK:
                continue
            if self.pool.num_users(block) <= sum(len(each) > place and each[place] == block for each in tables):
                break
            count += 1
        return count

    def release(self, table: list[int], *, is_on_host: bool) -> None:
        """Release all blocks of a table, the last first."""
        release_table(self.host_pool if is_on_host else self.pool, table)

    # ---- the host tier ----

    def swap_out_shortage(self, tables: Iterable[list[int]]) -> Shortage | None:
        """Return what the host tier lacks for the different blocks of these tables."""
        required, free = self.num_different(tables), self.host_pool.num_free_blocks
        if required > free:
            return Shortage(f"needs {required} host blocks, {free} are free", (required - free,))
        return None

    def swap_in_shortage(self, required: int, *, waive_watermark: bool) -> Shortage | None:
        """Return what is missing of `required` device blocks."""
        return _shortage(required, self.pool, 0 if waive_watermark else self._num_watermark_blocks)

    def num_different(self, tables: Iterable[list[int]]) -> int:
        """Return how many different blocks these tables hold: what a swap moves."""
        return len({block for table in tables for block in table} - {NULL_BLOCK})

    def num_blocks_to_swap_in(self, tables: Iterable[tuple[list[int], int, int]]) -> int:
        """Return the device blocks for tables of host blocks, each with its number of computed and of known tokens:
        what was swapped out, new ones at the end, and a copy for each writer but one of a shared block."""
        if self.holds_encoding:
            return self.num_different(table for table, _, _ in tables)
        size = self.block_size
        distinct: set[int] = set()
        writers: set[int] = set()
        num_more = 0
        for table, num_computed_tokens, num_tokens in tables:
            num_unseen = table.count(NULL_BLOCK)
            distinct.update(table[num_unseen:])
            num_live = self.retention.at_once(num_blocks_for(num_tokens + self.num_lookahead, size) - num_unseen)
            num_more += max(0, num_live - (len(table) - num_unseen))
            for block in table[num_computed_tokens // size :]:
                num_more += block in writers
                writers.add(block)
        return len(distinct) + num_more

    def move(self, table: list[int], places: dict[int, int], *, to_host: bool) -> list[int]:
        """Return the table of a sequence that moves between device and host. `places` maps blocks of the request that
        were moved already to their new ids, so that sequences which share a block share its new one.
        """
        target = self.host_pool if to_host else self.pool
        moved = []
        for block in table:
            if block == NULL_BLOCK:
                moved.append(NULL_BLOCK)
                continue
            if block in places:
                target.acquire(places[block])
            else:
                places[block] = target.allocate()
            moved.append(places[block])
        return moved


def fewest_blocks(caches: Iterable[GroupCache]) -> int:
    """Return the device blocks of the smallest group among those that have a block for every block of a prefix."""
    dense = (cache for cache in caches if not cache.retention.is_state and not cache.holds_encoding)
    return min((cache.pool.num_blocks for cache in dense), default=1)


def _shortage(required: int, pool: BlockPool, num_kept: int) -> Shortage | None:
    free = pool.num_free_blocks
    if free - required >= num_kept:
        return None
    because = f"needs {required} free KV blocks, {free} are free, {num_kept} stay free"
    return Shortage(because, (num_kept + required - free,))
