"""Block tables of all sequences, and the decisions that need them: may a request start, may a sequence grow.

Sequences share blocks by reference count; the first to write into a shared block copies it. Where layers read a window
of tokens alone, a table begins with null blocks: those that no later step reads have been released. Of states
only the last is kept; snapshots are released behind it, and found by their digests.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from octavo.core.cache_key import CacheKey
from octavo.core.cache_limits import CacheLimits
from octavo.core.messages import EngineCoreRequest
from octavo.core.sequence import Sequence, SequenceGroup
from octavo.core.step import BlockCopy, TableChange
from octavo.kv_cache.allocation import UNCHANGED, PrefixHit, Shortage, SlotGrowth, shortage_of_all
from octavo.kv_cache.block_hash import extend_chain, root_digest, tail_digest, token_keys
from octavo.kv_cache.block_pool import NULL_BLOCK, CachedBytes, Content
from octavo.kv_cache.block_table import BlockTable
from octavo.kv_cache.encodings import Encodings
from octavo.kv_cache.group_cache import GroupCache
from octavo.kv_cache.holds import BlockHolds
from octavo.kv_cache.listener import BlockListener
from octavo.kv_cache.pins import Pins
from octavo.kv_cache.prefix_search import find_hit
from octavo.kv_cache.swap import SwapSpace


class BlockManager:
    """Owns the blocks of all cache groups and every block table. It reads sequences and never writes them.

    A prefix is found where every cache group has it, and a request starts or grows where every group has the blocks.

    watermark: share of blocks that stay free at admission. max_cached_bytes: cached blocks take no fresh memory from
    there on; None for no such limit. snapshot_tokens: how far apart snapshots of states are; 0 for those of the prompt
    alone. keeps_states: whether any layers keep a state, so that no sequence can go back. releases_unseen: whether any
    layers stop reading a sequence's first tokens. pins: prefixes that stay in the cache, in at most half of each pool.
    token_groups: the first of all groups, without those that hold an encoder's output, which are `encodings`.
    swap_space: whether sequences can move to the host and back. holds: blocks that something else reads or writes.
    listeners: called when content enters or leaves the prefix index.
    """

    def __init__(
        self,
        limits: CacheLimits,
        *,
        watermark: float = 0.0,
        enable_prefix_caching: bool = True,
        eviction: str = "lru",
        max_cached_bytes: int | None = None,
        snapshot_tokens: int = 0,
    ) -> None:
        self.limits = limits
        self.block_size = limits.block_size
        self.enable_prefix_caching = enable_prefix_caching
        self._limits_cached = max_cached_bytes is not None and len(limits.groups) > 1
        cached_bytes = None if max_cached_bytes is None else CachedBytes(max_cached_bytes)
        self.groups = tuple(
            GroupCache(
                index,
                group,
                limits.block_size,
                watermark=watermark,
                eviction=eviction,
                cached_bytes=cached_bytes,
                num_lookahead=limits.num_lookahead,
                snapshot_tokens=snapshot_tokens,
            )
            for index, group in enumerate(limits.groups)
        )
        self.releases_unseen = any(cache.retention.releases for cache in self.groups)
        self.keeps_states = any(cache.retention.is_state for cache in self.groups)
        self.encodings = Encodings(self.groups, enable_prefix_caching=enable_prefix_caching)
        self.token_groups = tuple(cache for cache in self.groups if not cache.holds_encoding)
        self.pins = Pins(self.token_groups)
        self.listeners: list[BlockListener] = []
        for cache in self.token_groups:
            cache.pool.listeners = self.listeners
            if len(self.token_groups) > 1 and not cache.retention.releases:
                cache.pool.on_evicted = self._demote
        self._tables: dict[int, BlockTable] = {}
        self.swap_space = SwapSpace(self.groups, limits, self._tables)
        self.holds = BlockHolds([cache.pool for cache in self.groups])
        self._fetched_tokens: dict[int, int] = {}

    @property
    def tables(self) -> Mapping[int, BlockTable]:
        """The tables by sequence id, to be read only."""
        return self._tables

    @property
    def num_used_blocks(self) -> int:
        """The number of device blocks in use, of all groups."""
        return sum([cache.pool.num_used_blocks for cache in self.groups])

    @property
    def num_used_host_blocks(self) -> int:
        """The number of host blocks in use, of all groups."""
        return sum([cache.host_pool.num_used_blocks for cache in self.groups])

    def block_ids(self, sequence: Sequence) -> list[list[int]]:
        """Return the block ids of a sequence for each cache group, in the order of its tokens; to be read only."""
        return self._tables[sequence.seq_id].blocks

    def digests(self, sequence: Sequence) -> list[bytes]:
        """Return the names of the sequence's full blocks, as far as they were needed; to be read only."""
        return self._tables[sequence.seq_id].digests

    def transfer_digests(self, sequence: Sequence, cache_key: CacheKey) -> list[bytes]:
        """Return the names of all blocks of a sequence's prompt, of which the last may be partly filled. Where layers
        keep states, only of those before the last token: what is behind them is computed from the snapshot there."""
        end, size = sequence.num_prompt_tokens, self.block_size
        digests = extend_chain(self._table(sequence).digests, sequence.token_ids, size, cache_key)
        if self.keeps_states:
            return digests[: (end - 1) // size]
        tail = [tail_digest(digests, sequence.token_ids, end, size, cache_key)] if end % size else []
        return digests[: end // size] + tail

    # ---- admission ----

    def find_prefix(self, group: SequenceGroup, sequence: Sequence, num_tokens: int) -> PrefixHit:
        """Return the cached blocks of at most `num_tokens` first tokens, never of the last: its logits are needed."""
        key, num_encoded = group.request.cache_key, group.request.num_encoded_blocks(self.block_size)
        if not self.enable_prefix_caching:
            return PrefixHit(because="prefix caching is off", num_encoded_blocks=num_encoded)
        digests = extend_chain(self._table(sequence).digests, sequence.token_ids, self.block_size, key)
        if not group.may_read_prefix_cache:
            return find_hit(self.groups, [], [], 0, key, num_encoded)._replace(because=group.whole_prompt_because)
        most = min(num_tokens, len(sequence.token_ids) - 1)
        return find_hit(self.groups, digests, sequence.token_ids, most, key, num_encoded)

    def num_cached_tokens(self, request: EngineCoreRequest) -> int:
        """Return how many leading tokens of a prompt admission would find in the cache now."""
        if not self.enable_prefix_caching or request.params.needs_whole_prompt:
            return 0
        token_ids, key = request.prompt_token_ids, request.cache_key
        digests = extend_chain([], token_ids, self.block_size, key)
        return find_hit(self.groups, digests, token_ids, len(token_ids) - 1, key).num_tokens

    def shortage(
        self, group: SequenceGroup, hit: PrefixHit, *, waive_watermark: bool, is_returning: bool = False
    ) -> Shortage | None:
        """Return what the request lacks to have its blocks; None when it can have them. The watermark is waived when
        nothing runs, so that a shortage cannot last for ever.

        `is_returning`: it was preempted more than once; then as many blocks as it takes must stay free beyond the
        watermark, so that others grow by that much before it is preempted again.
        """
        return shortage_of_all(
            [
                cache.shortage(group, hit, waive_watermark=waive_watermark, is_returning=is_returning)
                for cache in self.groups
            ]
        )

    def allocate(
        self, sequence: Sequence, num_tokens: int, hit: PrefixHit, num_fetched_blocks: int = 0
    ) -> list[BlockCopy]:
        """Allocate blocks for the first `num_tokens` tokens of a sequence, of which `hit.num_tokens` need not be
        computed. Returns the copies that bring the last of those. Their sources are held until `end_planning`.

        num_fetched_blocks: blocks behind the hit that are fetched; then nothing is copied.
        """
        table = self._table(sequence)
        assert not table.blocks, f"sequence {sequence.seq_id} has blocks already"
        # hits of all groups are held first: allocating blocks of one group must not evict the hit of another
        found = [hit.blocks_of(i) if self._limits_cached else () for i in range(len(self.groups))]
        self.holds.hold("planning", [[*own, *hit.sources[i : i + 1]] for i, own in enumerate(found)])
        for cache, source in zip(self.groups, hit.sources, strict=False):
            cache.pool.note_hit(source)
        blocks = [cache.allocate(num_tokens, hit, num_fetched_blocks) for cache in self.groups]
        table.set_blocks(blocks, hit.num_blocks)
        table.lacks_encoding = bool(hit.num_encoded_blocks and self.encodings) and not hit.blocks_of(-1)
        if self.keeps_states:
            last = (sequence.num_prompt_tokens - 1) // self.block_size
            fetched = hit.num_blocks + num_fetched_blocks
            table.snapshots = (last, hit.num_parted, fetched, *self.pins.lengths(table.digests))
        return [BlockCopy(source, blocks[i][hit.num_blocks], i) for i, source in enumerate(hit.sources)]

    def end_planning(self) -> None:
        """Release what the planned step copies from: the next step may allocate it."""
        self.holds.end("planning")

    # ---- blocks that others read and write ----

    def begin_fetch(self, fetch_id: int, sequence: Sequence, first: int, num_blocks: int) -> list[list[int]]:
        """Keep `num_blocks` entries of a sequence's tables from `first` on until `end_fetch`, and return them. The last
        may be that of the sequence's last token, which is computed nevertheless: its logits are needed."""
        end = first + num_blocks
        blocks = [table[first:end] for table in self.block_ids(sequence)]
        self.holds.hold(("fetch", fetch_id), blocks)
        self._fetched_tokens[fetch_id] = min(end * self.block_size, len(sequence.token_ids) - 1)
        return blocks

    def end_fetch(self, fetch_id: int) -> int:
        """Release what a fetch has kept. Returns the leading tokens of its sequence that are in blocks now, if it
        succeeded."""
        self.holds.end(("fetch", fetch_id))
        return self._fetched_tokens.pop(fetch_id)

    # ---- growth ----

    def append_slots(self, sequence: Sequence, start: int, end: int, num_guesses: int = 0) -> SlotGrowth | None:
        """Make tokens [start, end), guesses behind them and the lookahead slots writable: new blocks at the end, copies
        of shared ones. No state is kept behind a guess. `start` is the next token to be computed.
        Returns None, with nothing changed, when too few blocks are free.
        """
        table, size, groups = self._tables[sequence.seq_id], self.block_size, self.token_groups
        if end + num_guesses <= table.writable_end:
            return UNCHANGED
        for cache, blocks in zip(groups, table.blocks, strict=False):
            num_blocks = cache.num_blocks_to_write(end, num_guesses)
            if not cache.has_room_to_write(blocks, start // size, num_blocks):
                return None
        changes: list[TableChange] = []
        copies: list[BlockCopy] = []
        first, snapshots = start // size, table.snapshots if self.enable_prefix_caching else None
        for cache, blocks in zip(groups, table.blocks, strict=False):
            num_blocks = cache.num_blocks_to_write(end, num_guesses)
            first_changed, copied = cache.make_writable(blocks, first, num_blocks, snapshots, len(self._tables))
            if first_changed < len(blocks):
                changes.append(TableChange(cache.index, first_changed, blocks[first_changed:]))
            copies += copied
        ends = zip(groups, table.blocks, strict=False)
        table.writable_end = min([size * len(each) - cache.num_lookahead for cache, each in ends])
        return SlotGrowth(changes, copies)

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Share all blocks of the parent with the child, whose first computed tokens are the parent's."""
        table, shared = self._table(child), self._tables[parent.seq_id]
        assert not table.blocks, f"sequence {child.seq_id} has blocks already"
        table.set_blocks(
            [cache.share(blocks) for cache, blocks in zip(self.groups, shared.blocks, strict=True)],
            shared.num_published,
        )
        table.digests[:] = shared.digests[: parent.num_computed_tokens // self.block_size]
        table.tail, table.snapshots = shared.tail, shared.snapshots
        shared.writable_end = 0

    def release_unseen(self, sequences: Iterable[Sequence]) -> None:
        """Release the blocks of these sequences that no later step reads, when a step has been planned: they stay
        findable, and their entries become null. Nothing happens where all layers read all tokens.

        The next row of a sequence starts at `num_computed_tokens`, or, when what submitted steps draw is dropped
        (`Sequence.pause`), at the last known token; of states always at the first. Submitted steps, the one just
        planned among them, may read more. But who gets a block from here on writes to it in a later step, and steps
        take effect in order: by then those have run. That is why this comes after all of a step is planned, and not
        while it is.
        """
        if not self.releases_unseen:
            return
        caches = [cache for cache in self.groups if cache.retention.releases]
        for sequence in sequences:
            start, last_known = sequence.num_computed_tokens, len(sequence.token_ids) - 1
            table = self._tables[sequence.seq_id]
            for cache in caches:
                position = start if start < last_known or cache.retention.is_state else last_known
                i = cache.index
                table.num_unseen[i] = cache.release_unseen(table.blocks[i], table.num_unseen[i], position)

    def publish(self, sequence: Sequence, cache_key: CacheKey) -> None:
        """Enter blocks that are full of known, computed tokens into the prefix index. Steps take effect in order, so a
        block that a submitted step fills may be read by any later step."""
        table, size = self._tables[sequence.seq_id], self.block_size
        num_full = min(sequence.num_computed_tokens, len(sequence.token_ids)) // size
        if table.lacks_encoding:
            self.encodings.publish(table, cache_key)
        if num_full <= table.num_published or not self.enable_prefix_caching:
            return
        digests = extend_chain(table.digests, sequence.token_ids, size, cache_key)
        for i in range(table.num_published, num_full):
            keys = token_keys(sequence.token_ids, i * size, (i + 1) * size, cache_key.placeholders)
            parent = digests[i - 1] if i else root_digest(cache_key)
            self._enter(table, i, Content(digests[i], parent, tuple(keys), not i))
        table.num_published = num_full

    def publish_tail(self, sequence: Sequence, cache_key: CacheKey) -> None:
        """Enter the last block of a sequence's prompt into the prefix index, if it is partly filled and the prompt is
        computed. Prompts that begin like this one are served by a copy of it. It is never found as a full block, also
        when the sequence has filled it. Nothing happens where layers keep states, which the next token changes."""
        if self.keeps_states:
            return
        table, end = self._tables[sequence.seq_id], sequence.num_prompt_tokens
        num_full = end // self.block_size
        if end % self.block_size == 0 or sequence.num_computed_tokens < end or table.num_published < num_full:
            return
        if table.tail is None:
            *before, table.tail = self.transfer_digests(sequence, cache_key)
            parent = before[-1] if before else root_digest(cache_key)
            keys = token_keys(sequence.token_ids, num_full * self.block_size, end, cache_key.placeholders)
            self._enter(table, num_full, Content(table.tail, parent, tuple(keys)))

    def _enter(self, table: BlockTable, index: int, content: Content) -> None:
        for cache, blocks in zip(self.token_groups, table.blocks, strict=False):
            # a sequence is swapped in without what it no longer reads
            if blocks[index] != NULL_BLOCK and (
                not cache.retention.is_state or cache.is_snapshot(index, table.snapshots)
            ):
                cache.pool.publish(blocks[index], content)
        if self.pins:
            self.pins.hold(content.digest)

    def invalidate(self, sequence: Sequence, num_trusted_tokens: int) -> None:
        """Remove the blocks after `num_trusted_tokens` tokens from the prefix index: their content is wrong."""
        table = self._tables[sequence.seq_id]
        tail = [] if table.tail is None else [table.tail]
        for digest in table.digests[num_trusted_tokens // self.block_size :] + tail:
            self.pins.let_go(digest)
            for cache in self.token_groups:
                cache.pool.invalidate(digest)
        self.encodings.invalidate(table)

    # ---- the host tier ----

    def swap_out(self, sequences: Iterable[Sequence]) -> list[BlockCopy]:
        """Move the sequences' computed blocks to the host, each once. The copies (device block, host block) are to be
        made before anything else writes to the device blocks."""
        return self._swap(list(sequences), to_host=True)

    def swap_in(self, sequences: Iterable[Sequence]) -> list[BlockCopy]:
        """Move the sequences' blocks back to the device, each once. The copies are (host block, device block)."""
        return self._swap(list(sequences), to_host=False)

    def _swap(self, sequences: list[Sequence], *, to_host: bool) -> list[BlockCopy]:
        after, copies = self.swap_space.moved(sequences, to_host=to_host)
        for sequence, blocks in zip(sequences, after, strict=True):
            table = self._tables[sequence.seq_id]
            self._release(table)
            # the blocks are new, so the index does not name them
            table.set_blocks(blocks, is_on_host=to_host)
        return copies

    # ---- the end ----

    def release(self, sequence: Sequence) -> None:
        """Release a sequence's blocks, the last first; without blocks nothing happens."""
        table = self._tables.get(sequence.seq_id)
        if table is not None:
            self._release(table)
            table.set_blocks([])

    def free(self, sequence: Sequence) -> None:
        """Release a sequence's blocks and forget the sequence; an unknown one is passed over."""
        self.release(sequence)
        self._tables.pop(sequence.seq_id, None)

    def reset_prefix_cache(self) -> bool:
        """Forget all cached content, pinned or not; refused (False) while any request or fetch has blocks."""
        if self.holds or any(table.blocks and not table.is_on_host for table in self._tables.values()):
            return False
        self.pins.clear()
        were_reset = [cache.pool.reset() for cache in self.groups]
        return all(were_reset)

    # ---- looking in ----

    def blocks_of(self, sequences: Iterable[Sequence], group: int) -> list[int]:
        """Return the device blocks of these sequences in one cache group: as often as they use them."""
        tables = (self._tables[sequence.seq_id] for sequence in sequences if sequence.seq_id in self._tables)
        return [block for table in tables for block in (table.blocks[group] if table.blocks else ()) if block]

    def num_blocks_used_by_others(self, sequences: Iterable[Sequence]) -> int:
        """Return how many leading blocks of the first of these sequences other sequences use as well, in each group."""
        tables = [self._tables[sequence.seq_id].blocks for sequence in sequences]
        dense = (cache for cache in self.token_groups if not cache.retention.is_state)
        shared = (cache.num_leading_shared([each[cache.index] for each in tables if each]) for cache in dense)
        return min(shared, default=0)

    def empty_blocks(self) -> list[list[int]]:
        """Return for each cache group the blocks that have neither users nor content."""
        return [cache.pool.empty_blocks() for cache in self.groups]

    def _demote(self, digest: bytes) -> None:
        """Let groups that keep less evict their blocks of a prefix soon: a group that keeps all has evicted it."""
        for cache in self.groups:
            if cache.retention.releases:
                cache.pool.demote(digest)

    def _table(self, sequence: Sequence) -> BlockTable:
        return self._tables.get(sequence.seq_id) or self._tables.setdefault(sequence.seq_id, BlockTable())

    def _release(self, table: BlockTable) -> None:
        for cache, blocks in zip(self.groups, table.blocks, strict=False):
            cache.release(blocks, is_on_host=table.is_on_host)
