"""Block tables of all sequences, and the decisions that need them: may a group come in, may a sequence grow.

Sequences share blocks by reference count; the first to write into a shared block copies it. Under a sliding window a
table begins with null blocks: those that no later step reads have been let go.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from octavo.core.arithmetic import num_blocks_for
from octavo.core.cache_key import CacheKey
from octavo.core.outputs import PinnedPrefix
from octavo.core.sequence import Sequence, SequenceGroup
from octavo.core.step import BlockCopy
from octavo.kv_cache.accounting import check_tables, num_leading_shared
from octavo.kv_cache.allocation import UNCHANGED, Allocation, AllocStatus, Growth, PrefixHit
from octavo.kv_cache.block_hash import extend_chain, extend_hashes, root_digest, token_keys
from octavo.kv_cache.block_pool import NULL_BLOCK, BlockPool, Content, release_table
from octavo.kv_cache.eviction import EVICTIONS
from octavo.kv_cache.pins import Pins
from octavo.kv_cache.sliding_window import SlidingWindow
from octavo.kv_cache.swap import SwapSpace


class BlockManager:
    """Owns the pools of device and host and the tables. `watermark` is the share of blocks kept free at admission.

    `sliding_window`: tokens that a query sees in every layer; blocks that no later step reads are released.
    `max_live_tokens`: see `SlidingWindow`. `max_cached_blocks`: see `BlockPool`.

    A sequence has a table on the device or, while its group is swapped out, one on the host. The host tier holds
    swapped groups only: nothing there is shared between groups or found by content.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        watermark: float,
        enable_prefix_caching: bool,
        num_host_blocks: int = 0,
        eviction: str = "lru",
        sliding_window: int | None = None,
        max_live_tokens: int | None = None,
        max_cached_blocks: int | None = None,
    ) -> None:
        self.pool = BlockPool(num_blocks, EVICTIONS[eviction](), max_cached_blocks)
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.num_watermark_blocks = int(watermark * num_blocks)
        self.window = None if sliding_window is None else SlidingWindow(sliding_window, block_size, max_live_tokens)
        self._tables: dict[int, list[int]] = {}
        self.swap_space = SwapSpace(BlockPool(num_host_blocks), self.pool, self._tables, block_size, self._at_once)
        self._held: list[int] = []
        self._pins = Pins(self.pool, num_blocks // 2)

    @property
    def host_pool(self) -> BlockPool:
        """Blocks of the host."""
        return self.swap_space.pool

    @property
    def tables(self) -> Mapping[int, list[int]]:
        """Block ids of all sequences on the device, by sequence id. To be looked at only."""
        return self._tables

    @property
    def host_tables(self) -> Mapping[int, list[int]]:
        """The same for sequences that are swapped out: blocks of the host."""
        return self.swap_space.tables

    @property
    def max_live_tokens(self) -> int | None:
        """Most tokens of one sequence that are in blocks at once; None for all."""
        return None if self.window is None else self.window.max_live_tokens

    def table(self, sequence: Sequence) -> list[int]:
        """Block ids of a sequence, in the order of its tokens. Not to be changed by the caller."""
        return self._tables[sequence.seq_id]

    # ---- admission ----

    def find_prefix(self, group: SequenceGroup, sequence: Sequence, num_tokens: int) -> PrefixHit:
        """The cached blocks that hold the first `num_tokens` tokens at most, of which the last is always computed anew
        when it is the sequence's last: its logits are needed."""
        if not self.enable_prefix_caching:
            return PrefixHit([], because="prefix caching is off")
        key = group.request.cache_key
        hashes = extend_hashes(sequence, self.block_size, key)
        if not group.may_read_prefix_cache:
            return PrefixHit([], because="prompt_logprobs needs every position computed")
        size = self.block_size
        usable = min(num_tokens, len(sequence.token_ids) - 1)
        digests = hashes[: usable // size]
        blocks: list[int] = []
        if self.window is not None:
            blocks = self.window.find_prefix(digests, self.pool.find)
        else:
            for digest in digests:
                block = self.pool.find(digest)
                if block is None:
                    break
                blocks.append(block)
        missing = digests[len(blocks)] if len(blocks) < len(digests) else None
        start = len(blocks) * size
        parent = hashes[len(blocks) - 1] if blocks else root_digest(key)
        rest = token_keys(sequence.token_ids, start, min(usable, start + size), key.placeholders)
        partial = self.pool.find_beginning(parent, rest)
        if missing is None:
            because = "the rest fills no block" if start + partial[1] < usable else ""
        else:
            because = "the next block was evicted" if self.pool.was_evicted(missing) else "the next block is new"
        return PrefixHit(blocks, missing, partial, because)

    def num_cached_tokens(self, group: SequenceGroup) -> int:
        """Leading tokens of the group's first sequence that admission would find in the cache now."""
        leader = group.live[0]
        hit = self.find_prefix(group, leader, len(leader.token_ids))
        return len(hit.blocks) * self.block_size + hit.partial[1]

    def num_required_blocks(self, group: SequenceGroup, num_lookahead: int = 0, num_unseen: int = 0) -> int:
        """Blocks that the group needs at once for all its known tokens, with `num_lookahead` slots more for each
        sequence: the common prefix, from block `num_unseen` on, once, and a tail for each."""
        size = self.block_size
        if group.width > 1 and not group.has_output:
            # the first token of each is written too, unless it is also the last
            tail_tokens = [group.num_prompt_tokens + min(1, group.max_tokens - 1) + num_lookahead] * group.width
        else:
            tail_tokens = [len(sequence.token_ids) + num_lookahead for sequence in group.live]
        at_once = self._at_once
        if len(tail_tokens) == 1:
            return at_once(num_blocks_for(tail_tokens[0], size) - num_unseen)
        num_shared = max(group.num_prompt_tokens // size, num_unseen)
        tails = sum(at_once(num_blocks_for(tokens, size) - num_shared) for tokens in tail_tokens)
        required = at_once(num_shared - num_unseen) + tails
        return min(required, len(tail_tokens) * at_once(required))

    def can_allocate(
        self,
        group: SequenceGroup,
        hit: PrefixHit,
        *,
        waive_watermark: bool,
        num_lookahead: int = 0,
        is_returning: bool = False,
    ) -> Allocation:
        """May the group come in? The watermark is waived when nothing runs, so that LATER cannot last for ever.

        `is_returning`: it was preempted before; beyond the watermark as many blocks stay free as it takes, so that
        others grow by that much before it has to give way again.
        """
        num_unseen = hit.num_unseen
        required = self.num_required_blocks(group, num_lookahead, num_unseen)
        if required > self.pool.num_blocks:
            return Allocation(
                AllocStatus.NEVER, f"needs {required} KV blocks, the pool has {self.pool.num_blocks} in all"
            )
        # a hit that has users costs nothing; one that is only cached leaves the free blocks like a new one
        from_free = required - (len(hit.blocks) - num_unseen) + sum(map(self.pool.is_cached, hit.blocks))
        # the source of a copy stays until the step is planned
        from_free += self.pool.is_cached(hit.partial[0])
        kept = 0 if waive_watermark else max(self.num_watermark_blocks, from_free if is_returning else 0)
        free = self.pool.num_free_blocks
        if free - from_free < kept:
            because = f"needs {from_free} free KV blocks, {free} are free, {kept} stay free"
            return Allocation(AllocStatus.LATER, because, kept + from_free - free)
        return Allocation(AllocStatus.OK)

    def allocate(self, sequence: Sequence, num_tokens: int, hit: PrefixHit) -> list[BlockCopy]:
        """Give a sequence blocks for its first `num_tokens` tokens, the cached ones first; where a sliding window lets
        go of blocks, no more than it holds at once: its table grows with the steps.

        Answers the copy that brings the beginning of the block after those. Its source is held until `end_planning`.
        """
        assert sequence.seq_id not in self._tables, f"sequence {sequence.seq_id} has blocks already"
        source, num_same = hit.partial
        if num_same:
            self.pool.acquire(source)
            self.pool.note_hit(source)
            self._held.append(source)
        num_unseen = hit.num_unseen
        for block in hit.blocks[num_unseen:]:
            self.pool.acquire(block)
            self.pool.note_hit(block)
        num_live = self._at_once(num_blocks_for(num_tokens, self.block_size) - num_unseen)
        num_new = num_unseen + num_live - len(hit.blocks)
        self._tables[sequence.seq_id] = hit.blocks + [self.pool.allocate() for _ in range(num_new)]
        sequence.num_computed_tokens = len(hit.blocks) * self.block_size + num_same
        sequence.num_published_blocks = len(hit.blocks)
        return [BlockCopy(source, self._tables[sequence.seq_id][len(hit.blocks)])] if num_same else []

    def end_planning(self) -> None:
        """A step is planned: what it copies from may be given out by the next one."""
        for block in self._held:
            self.pool.release(block)
        self._held.clear()

    # ---- growth ----

    def has_slot(self, sequence: Sequence, position: int) -> bool:
        """Is the token at `position` one of the last block, and that the sequence's alone? `append_slots` for this one
        token would answer UNCHANGED."""
        table = self._tables[sequence.seq_id]
        return position // self.block_size == len(table) - 1 and not self.pool.is_shared(table[-1])

    def append_slots(self, sequence: Sequence, start: int, end: int, num_lookahead: int = 0) -> Growth | None:
        """Make tokens [start, end) and `num_lookahead` more writable: new blocks at the end, copies of shared ones.

        Answers None, with nothing changed, when the pool has too few free blocks.
        """
        table = self._tables[sequence.seq_id]
        size = self.block_size
        num_new = -(-(end + num_lookahead) // size) - len(table)
        first = start // size
        is_shared = self.pool.is_shared
        if num_new <= 0 and first == len(table) - 1 and not is_shared(table[first]):
            return UNCHANGED
        shared = [i for i in range(first, len(table)) if is_shared(table[i])]
        if max(num_new, 0) + len(shared) > self.pool.num_free_blocks:
            return None
        if not shared and num_new <= 0:
            return UNCHANGED
        copies = []
        for i in shared:
            source, table[i] = table[i], self.pool.allocate()
            self.pool.release(source)
            copies.append(BlockCopy(source, table[i]))
        first_index = shared[0] if shared else len(table)
        for _ in range(num_new):
            table.append(self.pool.allocate())
        return Growth(first_index, table[first_index:], copies)

    def roll_back(self, sequence: Sequence, num_tokens: int) -> None:
        """Tokens from `num_tokens` on are taken back: known ones, and what was computed of them or of guesses.

        Blocks that only they are in are given back. When others share the last block and it is published, the tokens in
        it are to be computed again. No submitted step may still compute any of them, and under a sliding window the
        next token to be computed sees none that were let go.
        """
        table = self._tables[sequence.seq_id]
        num_full, num_blocks = num_tokens // self.block_size, num_blocks_for(num_tokens, self.block_size)
        del sequence.token_ids[num_tokens:], sequence.block_hashes[num_full:]
        sequence.num_computed_tokens = min(sequence.num_computed_tokens, num_tokens)
        sequence.num_published_blocks = min(sequence.num_published_blocks, num_full)
        while len(table) > num_blocks:
            self.pool.release(table.pop())
        if num_full < len(table) and self.pool.has_content(table[num_full]):
            # the next token would be written over what the last block is found by
            if self.pool.is_shared(table[num_full]):
                self.pool.release(table.pop())
                sequence.num_computed_tokens = min(sequence.num_computed_tokens, num_full * self.block_size)
            else:
                self.pool.withdraw(table[num_full])
        unseen = 0 if self.window is None else self.window.num_unseen_blocks(sequence.num_computed_tokens)
        assert NULL_BLOCK not in table[unseen:], "the next token would see blocks that left the window"

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """The child shares all blocks of its parent."""
        assert child.seq_id not in self._tables, f"sequence {child.seq_id} has blocks already"
        table = self._tables[parent.seq_id]
        self.pool.share(table[table.count(NULL_BLOCK) :])
        self._tables[child.seq_id] = list(table)

    def release_unseen(self, sequences: Iterable[Sequence]) -> None:
        """Let go of the blocks of these sequences that no later step reads, when a step has been planned: they stay
        findable, and their entries become null. Nothing happens without a sliding window.

        The next row of a sequence starts at `num_computed_tokens`, or, when what submitted steps draw is dropped
        (`Sequence.pause`), at the last known token; of what lies before its start it reads `window.num_tokens - 1`
        tokens. Submitted steps, the one just planned among them, may read more. But who gets a block from here on
        writes to it in a later step, and steps take effect in order: by then those have run. That is why this comes
        after all of a step is planned, and not while it is.
        """
        if self.window is None:
            return
        num_before, size, tables = self.window.num_tokens - 1, self.block_size, self._tables
        for sequence in sequences:
            start, last_known = sequence.num_computed_tokens, len(sequence.token_ids) - 1
            end = ((start if start < last_known else last_known) - num_before) // size
            if end <= 0:
                continue
            table, first = tables[sequence.seq_id], end
            while first and table[first - 1] != NULL_BLOCK:
                first -= 1
            # the head first: hits need the blocks next to where they end, so those nearest to the window are worth most
            for i in range(first, end):
                self.pool.release(table[i])
                table[i] = NULL_BLOCK

    def publish(self, sequence: Sequence, cache_key: CacheKey) -> None:
        """Tell the prefix index of blocks that are full of known, computed tokens. Steps take effect in order, so a
        block that a submitted step fills may be read by any later step."""
        size = self.block_size
        num_full = min(sequence.num_computed_tokens, len(sequence.token_ids)) // size
        if num_full <= sequence.num_published_blocks or not self.enable_prefix_caching:
            return
        hashes = extend_hashes(sequence, size, cache_key)
        table = self._tables[sequence.seq_id]
        for i in range(sequence.num_published_blocks, num_full):
            if table[i] == NULL_BLOCK:
                continue  # it was swapped in without what it no longer sees
            parent = hashes[i - 1] if i else root_digest(cache_key)
            keys = token_keys(sequence.token_ids, i * size, (i + 1) * size, cache_key.placeholders)
            self.pool.publish(table[i], Content(hashes[i], parent, tuple(keys)))
            if self._pins:
                self._pins.hold(hashes[i])
        sequence.num_published_blocks = num_full

    def disown(self, sequence: Sequence, num_trusted_tokens: int) -> None:
        """What a sequence computed after its first tokens went wrong: nobody is to find it."""
        for digest in sequence.block_hashes[num_trusted_tokens // self.block_size :]:
            self._pins.let_go(digest)
            self.pool.disown(digest)

    # ---- pins ----

    @property
    def num_pinned_blocks(self) -> int:
        """Device blocks that pins hold, whoever else uses them."""
        return len(self._pins.blocks)

    def pin(self, token_ids: list[int], cache_key: CacheKey, until: float) -> PinnedPrefix:
        """Keep the full blocks of this prefix until then: those that are cached, and the others once they are.

        Pins take at most half of the pool together, and go when a request could not run otherwise.
        """
        if not self.enable_prefix_caching:
            return PinnedPrefix(because="prefix caching is off")
        digests, size = extend_chain([], token_ids, self.block_size, cache_key), self.block_size
        num_kept = self._pins.pin(digests, until)
        num_cached = self._pins.num_held(digests[:num_kept])
        because = f"only full blocks are kept, of {size} tokens each" if num_kept * size < len(token_ids) else ""
        if num_kept < len(digests):
            because = f"pins may take half of the {self.pool.num_blocks} KV blocks, and this one has no more of them"
        return PinnedPrefix(num_tokens=num_kept * size, num_cached_tokens=num_cached * size, because=because)

    def unpin(self, token_ids: list[int], cache_key: CacheKey) -> bool:
        """End the pin of exactly this prefix; False when there is none."""
        return self._pins.unpin(extend_chain([], token_ids, self.block_size, cache_key))

    def expire_pins(self, now: float) -> None:
        """End the pins whose time is over."""
        if self._pins:
            self._pins.expire(now)

    def clear_pins(self) -> int:
        """End all pins. Answers how many blocks they held."""
        return self._pins.clear()

    def blocks_of(self, sequences: Iterable[Sequence]) -> Iterator[int]:
        """Device blocks of these sequences: as often as they use them."""
        for sequence in sequences:
            yield from filter(None, self._tables.get(sequence.seq_id, ()))

    def num_blocks_used_by_others(self, sequences: Iterable[Sequence]) -> int:
        """Leading blocks of the first of these sequences that other sequences than these use as well."""
        return num_leading_shared(self.pool, [self._tables[sequence.seq_id] for sequence in sequences])

    # ---- the host tier ----

    def swap_out(self, sequences: Iterable[Sequence]) -> list[BlockCopy]:
        """Move the sequences' computed blocks to the host. See `SwapSpace.swap_out`."""
        return self.swap_space.swap_out(sequences)

    def can_swap_in(
        self, sequences: Iterable[Sequence], *, waive_watermark: bool, num_lookahead: int = 0
    ) -> Allocation:
        """May the sequences come back? As for `can_allocate`; nothing of the device's prefix cache is used."""
        num_kept = 0 if waive_watermark else self.num_watermark_blocks
        return self.swap_space.can_swap_in(sequences, num_kept, num_lookahead)

    def swap_in(self, sequences: Iterable[Sequence]) -> list[BlockCopy]:
        """Move the sequences' blocks back to the device. See `SwapSpace.swap_in`."""
        return self.swap_space.swap_in(sequences)

    # ---- the end ----

    def free(self, sequence: Sequence) -> None:
        """Give back a sequence's blocks, the last first; without blocks nothing happens."""
        release_table(self.pool, self._tables.pop(sequence.seq_id, []))
        release_table(self.host_pool, self.swap_space.tables.pop(sequence.seq_id, []))

    def reset_prefix_cache(self) -> bool:
        """Forget all cached content, pinned or not; refused (False) while any request has blocks."""
        if self._tables:
            return False
        self._pins.clear()
        return self.pool.reset()

    def check(self, running: Iterable[Sequence], swapped: Iterable[Sequence] = ()) -> None:
        """Prove the accounting: exactly these sequences hold tables on the device and on the host. AssertionError."""
        self._pins.check()
        check_tables(self.pool, self._tables, running, self._pins.blocks)
        check_tables(self.host_pool, self.swap_space.tables, swapped)

    def _at_once(self, num_blocks: int) -> int:
        """How many of these blocks of a sequence are needed at the same time."""
        return num_blocks if self.window is None else self.window.at_once(num_blocks)
