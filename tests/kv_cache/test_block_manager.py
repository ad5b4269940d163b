"""Admission, growth, sharing and copying of blocks."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from octavo.core.cache_key import PLAIN, CacheKey, Placeholder
from octavo.core.outputs import PinnedPrefix
from octavo.core.sequence import Sequence, SequenceGroup
from octavo.core.step import BlockCopy
from octavo.kv_cache.allocation import UNCHANGED, PrefixHit
from octavo.kv_cache.block_manager import BlockManager
from tests.fakes.accounting import check_blocks
from tests.fakes.block_manager import allocate, make_manager, only, table
from tests.fakes.engine import make_request
from tests.fakes.listener import Mirror


def make_group(num_tokens: int, n: int = 1, first_seq_id: int = 1) -> SequenceGroup:
    return SequenceGroup(make_request("r", range(num_tokens), n=n), 0, first_seq_id)


def computed(manager: BlockManager, num_tokens: int, num_computed: int | None = None) -> Sequence:
    """A sequence of which so many tokens, or all, are computed, and the prefix index told of them."""
    sequence = allocate(manager, num_tokens, seq_id=7)
    sequence.num_computed_tokens = num_tokens if num_computed is None else num_computed
    manager.publish(sequence, PLAIN)
    return sequence


def forked(manager: BlockManager, num_tokens: int) -> tuple[Sequence, Sequence]:
    parent = allocate(manager, num_tokens)
    child = parent.fork(2, 1)
    manager.fork(parent, child)
    return parent, child


class TestAdmission:
    def test_what_does_not_fit_alone_was_refused_when_it_arrived(self) -> None:
        with pytest.raises(AssertionError, match="does not fit alone"):
            make_manager(2).shortage(make_group(9), PrefixHit(), waive_watermark=True)

    def test_it_counts_the_shared_prompt_and_one_tail_for_each_sequence(self) -> None:
        manager = make_manager(6)
        other = allocate(manager, 4)
        assert manager.shortage(make_group(9, n=3), PrefixHit(), waive_watermark=True) is None
        assert manager.shortage(make_group(9, n=4), PrefixHit(), waive_watermark=True) is not None
        manager.free(other)
        assert manager.shortage(make_group(9, n=4), PrefixHit(), waive_watermark=True) is None

    def test_a_tail_that_is_never_written_needs_no_block(self) -> None:
        group = SequenceGroup(make_request("r", range(8), n=3, max_tokens=1), 0, 1)
        assert make_manager(2).shortage(group, PrefixHit(), waive_watermark=True) is None

    def test_later_while_others_hold_the_blocks(self) -> None:
        manager = make_manager(3)
        other = allocate(manager, 8, seq_id=7)
        assert manager.shortage(make_group(8), PrefixHit(), waive_watermark=False) is not None
        manager.free(other)
        assert manager.shortage(make_group(8), PrefixHit(), waive_watermark=False) is None

    def test_the_watermark_keeps_blocks_free_unless_waived(self) -> None:
        manager = make_manager(10, watermark=0.25)
        group = make_group(36)
        assert manager.shortage(group, PrefixHit(), waive_watermark=False) is not None
        assert manager.shortage(group, PrefixHit(), waive_watermark=True) is None

    def test_a_hit_that_is_in_use_costs_nothing_and_a_cached_one_costs_a_free_block(self) -> None:
        manager = make_manager(4)
        owner = computed(manager, 8)
        group = make_group(16)
        hit = manager.find_prefix(group, group.live[0], 16)
        assert len(hit.blocks[0]) == 2
        assert manager.shortage(group, hit, waive_watermark=True) is None
        manager.free(owner)
        thief = Sequence(8, 0, [9], 1)
        manager.allocate(thief, 1, PrefixHit())
        assert manager.shortage(group, hit, waive_watermark=True) is not None


class TestPrefix:
    def test_the_last_token_is_always_computed(self) -> None:
        manager = make_manager()
        computed(manager, 8)
        group = make_group(8)
        assert len(manager.find_prefix(group, group.live[0], 8).blocks[0]) == 1

    def test_the_first_missing_block_is_named(self) -> None:
        manager = make_manager()
        group = make_group(9)
        hit = manager.find_prefix(group, group.live[0], 9)
        assert hit.missing == manager.digests(group.live[0])[0]

    def test_only_computed_blocks_are_published(self) -> None:
        manager = make_manager()
        computed(manager, 8, 7)
        group = make_group(12)
        assert len(manager.find_prefix(group, group.live[0], 12).blocks[0]) == 1

    def test_nothing_is_read_or_published_when_caching_is_off(self) -> None:
        manager = make_manager(enable_prefix_caching=False)
        owner = computed(manager, 8)
        group = make_group(12)
        hit = manager.find_prefix(group, group.live[0], 12)
        assert (hit.num_tokens, hit.because) == (0, "prefix caching is off")
        manager.free(owner)
        assert only(manager).pool.num_free_blocks == 10


class TestGrowth:
    def test_room_in_the_last_block_changes_nothing(self) -> None:
        manager = make_manager()
        assert manager.append_slots(allocate(manager, 5), 5, 6) == UNCHANGED

    def test_slots_are_known_to_be_writable_until_the_sequence_forks(self) -> None:
        manager = make_manager()
        parent = allocate(manager, 6)
        manager.append_slots(parent, 4, 6)
        assert manager.tables[1].writable_end == 8
        child = parent.fork(2, 1)
        manager.fork(parent, child)
        assert manager.tables[1].writable_end == manager.tables[2].writable_end == 0
        manager.append_slots(child, 6, 7)
        manager.append_slots(parent, 6, 7)
        assert manager.tables[1].writable_end == manager.tables[2].writable_end == 8

    def test_a_full_block_is_followed_by_a_new_one(self) -> None:
        manager = make_manager()
        sequence = allocate(manager, 8)
        growth = manager.append_slots(sequence, 8, 9)
        assert growth is not None
        assert (growth.changes[0].first_index, len(growth.changes[0].block_ids), growth.copies) == (2, 1, [])

    def test_lookahead_slots_are_counted(self) -> None:
        manager = make_manager(num_lookahead=6)
        sequence = allocate(manager, 6)
        growth = manager.append_slots(sequence, 6, 7)
        assert growth is not None
        assert len(table(manager, sequence)) == 4

    def test_none_and_no_change_when_blocks_are_short(self) -> None:
        manager = make_manager(2)
        sequence = allocate(manager, 8)
        assert manager.append_slots(sequence, 8, 9) is None
        assert len(table(manager, sequence)) == 2
        check_blocks(manager, [sequence])

    def test_the_first_writer_copies_a_shared_block_and_the_last_keeps_it(self) -> None:
        manager = make_manager()
        parent, child = forked(manager, 6)
        shared = list(table(manager, parent))
        growth = manager.append_slots(child, 6, 7)
        assert growth is not None
        assert growth.copies == [BlockCopy(shared[1], growth.changes[0].block_ids[0])]
        assert growth.changes[0].first_index == 1
        assert table(manager, child)[0] == shared[0]
        assert manager.append_slots(parent, 6, 7) == UNCHANGED
        check_blocks(manager, [parent, child])

    def test_every_shared_block_that_may_be_written_is_copied(self) -> None:
        manager = make_manager(num_lookahead=3)
        parent = allocate(manager, 6)
        assert manager.append_slots(parent, 6, 7) is not None
        child = parent.fork(2, 1)
        manager.fork(parent, child)
        growth = manager.append_slots(child, 6, 7)
        assert growth is not None
        assert [copy.source for copy in growth.copies] == table(manager, parent)[1:]
        assert table(manager, child)[0] == table(manager, parent)[0]
        assert growth.changes[0].block_ids == table(manager, child)[1:] == [copy.target for copy in growth.copies]

    def test_a_fork_at_a_block_border_needs_no_copy(self) -> None:
        manager = make_manager()
        _, child = forked(manager, 8)
        growth = manager.append_slots(child, 8, 9)
        assert growth is not None
        assert growth.copies == []


class Blocks(RuleBasedStateMachine):
    """Any order of allocate, append, fork, publish, free keeps the accounting; no written slot is shared."""

    @initialize(
        num_blocks=st.integers(1, 12),
        block_size=st.integers(1, 4),
        caching=st.booleans(),
        window=st.sampled_from([None, None, 1, 3, 7]),
    )
    def build(self, num_blocks: int, block_size: int, caching: bool, window: int | None) -> None:
        self.manager = make_manager(num_blocks, block_size, enable_prefix_caching=caching, window=window)
        self.sequences: dict[int, Sequence] = {}
        self.next_id = 1
        self.mirror = Mirror()
        self.manager.listeners.append(self.mirror)

    @rule(token_ids=st.lists(st.integers(0, 1), min_size=1, max_size=10))
    def allocate(self, token_ids: list[int]) -> None:
        group = SequenceGroup(make_request("r", token_ids), 0, self.next_id)
        sequence = group.live[0]
        hit = self.manager.find_prefix(group, sequence, len(token_ids))
        cache = only(self.manager)
        fits_alone = cache.num_required_blocks(group, hit.num_unseen(0)) <= cache.pool.num_blocks
        if fits_alone and self.manager.shortage(group, hit, waive_watermark=True) is None:
            self.manager.allocate(sequence, len(token_ids), hit)
            self.manager.end_planning()
            sequence.num_computed_tokens = len(token_ids)
            self.manager.publish(sequence, PLAIN)
            self.sequences[sequence.seq_id] = sequence
        self.next_id += 1

    @precondition(lambda self: self.sequences)
    @rule(data=st.data(), count=st.integers(1, 5))
    def append(self, data: st.DataObject, count: int) -> None:
        sequence = data.draw(st.sampled_from(list(self.sequences.values())))
        start = sequence.num_computed_tokens
        free = only(self.manager).pool.num_free_blocks
        growth = self.manager.append_slots(sequence, start, start + count)
        if growth is None:
            assert only(self.manager).pool.num_free_blocks == free
            return
        size = self.manager.block_size
        blocks = table(self.manager, sequence)
        assert len(blocks) * size >= start + count
        written = blocks[start // size : (start + count - 1) // size + 1]
        others = {b for s in self.sequences.values() if s is not sequence for b in table(self.manager, s)}
        assert not others & set(written)
        sequence.token_ids += [0] * count
        sequence.num_computed_tokens += count
        self.manager.publish(sequence, PLAIN)
        self.manager.release_unseen([sequence])

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        parent = data.draw(st.sampled_from(list(self.sequences.values())))
        child = parent.fork(self.next_id, 1)
        self.manager.fork(parent, child)
        self.sequences[child.seq_id] = child
        self.next_id += 1

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        self.manager.free(self.sequences.pop(data.draw(st.sampled_from(list(self.sequences)))))

    @precondition(lambda self: self.sequences)
    @rule(data=st.data(), until=st.integers(0, 9))
    def keep(self, data: st.DataObject, until: int) -> None:
        sequence = data.draw(st.sampled_from(list(self.sequences.values())))
        self.manager.publish_tail(sequence, PLAIN)
        self.manager.pins.keep(self.manager.transfer_digests(sequence, PLAIN), until)

    @precondition(lambda self: self.sequences)
    @rule(data=st.data(), num_trusted=st.integers(0, 10))
    def invalidate(self, data: st.DataObject, num_trusted: int) -> None:
        sequence = self.sequences.pop(data.draw(st.sampled_from(list(self.sequences))))
        self.manager.invalidate(sequence, num_trusted)
        self.manager.free(sequence)

    @rule(token_ids=st.lists(st.integers(0, 1), min_size=1, max_size=10), until=st.integers(0, 9))
    def pin(self, token_ids: list[int], until: int) -> None:
        pinned = self.manager.pins.pin(token_ids, PLAIN, until)
        assert pinned.num_cached_tokens <= pinned.num_tokens <= len(token_ids)

    @rule(token_ids=st.lists(st.integers(0, 1), min_size=1, max_size=10))
    def unpin(self, token_ids: list[int]) -> None:
        self.manager.pins.unpin(token_ids, PLAIN)

    @rule(now=st.integers(0, 9))
    def expire_pins(self, now: int) -> None:
        self.manager.pins.expire(now)

    @invariant()
    def accounts_agree(self) -> None:
        if hasattr(self, "manager"):
            check_blocks(self.manager, self.sequences.values())
            self.mirror.check(self.manager)
            size = self.manager.block_size
            for sequence in self.sequences.values():
                for place, block in enumerate(table(self.manager, sequence)):
                    content = only(self.manager).pool._contents[block]
                    if content is not None:
                        known = tuple(sequence.token_ids[place * size : (place + 1) * size])
                        both = min(len(known), len(content.token_keys))
                        assert content.token_keys[:both] == known[:both], "a block is found by what it does not hold"


Blocks.TestCase.settings = settings(max_examples=100, stateful_step_count=20, deadline=None)
TestBlocks = Blocks.TestCase


class TestPrefixCacheByToken:
    """What begins alike is copied."""

    def cached(self, tokens: list[int], num_blocks: int = 8) -> BlockManager:
        manager = make_manager(num_blocks)
        group = SequenceGroup(make_request("owner", tokens), 0, 1)
        owner = group.live[0]
        manager.allocate(owner, len(tokens), PrefixHit())
        owner.num_computed_tokens = len(tokens)
        manager.publish(owner, PLAIN)
        manager.free(owner)
        return manager

    def test_a_block_that_begins_alike_is_copied_as_far_as_it_is_alike(self) -> None:
        manager = self.cached([1, 2, 3, 4, 5, 6, 7, 8])
        group = SequenceGroup(make_request("r", [1, 2, 3, 4, 5, 6, 9, 9, 9]), 0, 2)
        hit = manager.find_prefix(group, group.live[0], 9)
        assert hit.blocks[0] == [only(manager).pool.find(manager.digests(group.live[0])[0])]
        assert hit.num_copied_tokens == 2
        (copy,) = manager.allocate(group.live[0], 9, hit)
        assert copy.source == hit.sources[0]
        assert copy.target == table(manager, group.live[0])[1]
        assert hit.num_tokens == 6
        # nobody may be given the source before the copy is made
        assert only(manager).pool.num_users(copy.source) == 1
        manager.end_planning()
        check_blocks(manager, [group.live[0]])

    def test_the_last_token_is_always_computed(self) -> None:
        manager = self.cached([1, 2, 3, 4, 5, 6, 7, 8])
        group = SequenceGroup(make_request("r", [1, 2, 3, 4, 5, 6]), 0, 2)
        hit = manager.find_prefix(group, group.live[0], 6)
        assert (len(hit.blocks[0]), hit.num_copied_tokens) == (1, 1)

    def test_a_miss_has_a_reason(self) -> None:
        manager = self.cached([1, 2, 3, 4, 5, 6, 7, 8], num_blocks=2)

        def reason(tokens: list[int]) -> str:
            group = SequenceGroup(make_request("r", tokens), 0, 10 + tokens[4])
            return manager.find_prefix(group, group.live[0], len(tokens)).because

        assert reason([1, 2, 3, 4, 9, 9, 9, 9, 9]) == "the next block is new"
        thief = SequenceGroup(make_request("thief", [7]), 0, 3).live[0]
        manager.allocate(thief, 1, PrefixHit())
        assert reason([1, 2, 3, 4, 5, 6, 7, 8, 9]) == "the next block was evicted"

    def test_a_sequence_that_was_freed_loses_its_tail_first(self) -> None:
        manager = self.cached(list(range(16)), num_blocks=4)
        for num_left in (3, 2, 1, 0):
            allocate(manager, 1, seq_id=10 + num_left)
            group = SequenceGroup(make_request("r", [*range(16), 1]), 0, 2)
            assert len(manager.find_prefix(group, group.live[0], 17).blocks[0]) == num_left


CAT, DOG = b"c" * 32, b"d" * 32
TOKENS = list(range(14))


class TestKeys:
    """What salts, adapters and images keep apart, in whole blocks and in beginnings of blocks."""

    def group(self, tokens: list[int], key: CacheKey, seq_id: int = 2) -> SequenceGroup:
        request = make_request("r", tokens)
        request.cache_salt, request.adapter, request.placeholders = key.cache_salt, key.adapter, key.placeholders
        return SequenceGroup(request, 0, seq_id)

    def cached(self, *keys: CacheKey) -> BlockManager:
        """A manager whose cache has TOKENS under each of these keys: three full blocks of four."""
        manager = make_manager(20)
        for number, key in enumerate(keys):
            group = self.group(TOKENS, key, seq_id=10 + number)
            sequence = group.live[0]
            manager.allocate(sequence, len(TOKENS), PrefixHit())
            sequence.num_computed_tokens = len(TOKENS)
            manager.publish(sequence, group.request.cache_key)
            manager.free(sequence)
            check_blocks(manager, [])
        return manager

    def num_cached(self, manager: BlockManager, tokens: list[int], key: CacheKey) -> int:
        return manager.num_cached_tokens(self.group(tokens, key).request)

    @pytest.mark.parametrize("other", [CacheKey("t"), CacheKey("s", "b"), CacheKey(None, "a"), CacheKey("s"), PLAIN])
    def test_other_salts_and_adapters_share_neither_blocks_nor_parts_of_them(self, other: CacheKey) -> None:
        manager = self.cached(CacheKey("s", "a"))
        group = self.group(TOKENS, other)
        hit = manager.find_prefix(group, group.live[0], len(TOKENS))
        assert (hit.num_tokens, hit.sources) == (0, [])
        assert self.num_cached(manager, TOKENS, CacheKey("s", "a")) == 12
        assert self.num_cached(manager, [*TOKENS[:6], 99], CacheKey("s", "a")) == 6

    @pytest.mark.parametrize("offset", range(12))
    @pytest.mark.parametrize("other", [DOG, None])
    def test_another_image_is_no_hit_from_its_first_token_on(self, offset: int, other: bytes | None) -> None:
        cat = CacheKey(placeholders=(Placeholder(offset, 3, CAT),))
        manager = self.cached(cat)
        key = CacheKey(placeholders=(Placeholder(offset, 3, other),)) if other else PLAIN
        assert self.num_cached(manager, TOKENS, key) == offset
        assert self.num_cached(manager, TOKENS, cat) == 12
        mine = self.group(TOKENS, cat)
        hit = manager.find_prefix(mine, mine.live[0], len(TOKENS))
        theirs = self.group(TOKENS, key, seq_id=3)
        assert manager.find_prefix(theirs, theirs.live[0], len(TOKENS)).blocks[0] == hit.blocks[0][: offset // 4]

    def test_a_longer_image_with_the_same_beginning_is_another_one_by_its_digest(self) -> None:
        manager = self.cached(CacheKey(placeholders=(Placeholder(2, 3, CAT),)))
        assert self.num_cached(manager, TOKENS, CacheKey(placeholders=(Placeholder(2, 5, DOG),))) == 2

    def test_both_images_are_found_beside_each_other(self) -> None:
        keys = [CacheKey(placeholders=(Placeholder(5, 4, digest),)) for digest in (CAT, DOG)]
        manager = self.cached(*keys)
        blocks = []
        for seq_id, key in enumerate(keys):
            group = self.group(TOKENS, key, seq_id)
            blocks.append(manager.find_prefix(group, group.live[0], len(TOKENS)).blocks[0])
        # the second one computed its first block again, and the one that was there first is found
        assert blocks[0][0] == blocks[1][0]
        assert len({*blocks[0], *blocks[1]}) == 5

    def test_a_pin_holds_the_blocks_of_its_own_image_and_salt(self) -> None:
        cat, dog = (CacheKey("s", None, (Placeholder(5, 4, digest),)) for digest in (CAT, DOG))
        manager = self.cached(cat)
        assert manager.pins.pin(TOKENS, dog, until=1.0).num_cached_tokens == 4
        assert manager.pins.pin(TOKENS, cat, until=1.0).num_cached_tokens == 12
        assert manager.pins.pin(TOKENS, PLAIN, until=1.0).num_cached_tokens == 0
        check_blocks(manager, [])
        assert manager.pins.unpin(TOKENS, dog)
        assert not manager.pins.unpin(TOKENS, dog)
        assert only(manager).pool.num_used_blocks == 3


class TestDisown:
    def test_what_came_after_the_trusted_tokens_is_found_no_more_pinned_or_not(self) -> None:
        manager = make_manager(8)
        tokens = list(range(12))
        manager.pins.pin(tokens, PLAIN, until=9.0)
        group = SequenceGroup(make_request("owner", tokens), 0, 1)
        sequence = group.live[0]
        manager.allocate(sequence, 12, PrefixHit())
        sequence.num_computed_tokens = 12
        manager.publish(sequence, PLAIN)
        manager.invalidate(sequence, 4)
        other = make_group(13, first_seq_id=2)
        assert manager.find_prefix(other, other.live[0], 13).blocks[0] == table(manager, sequence)[:1]
        check_blocks(manager, [sequence])
        manager.free(sequence)
        check_blocks(manager, [])
        assert only(manager).pool.num_used_blocks == 1  # what is pinned and trusted


class TestPins:
    """What is pinned stays, from when it is computed until its time is over."""

    def compute(self, manager: BlockManager, tokens: list[int], seq_id: int = 1) -> Sequence:
        """A sequence with these tokens in its blocks, and the prefix index told of them."""
        group = SequenceGroup(make_request("owner", tokens), 0, seq_id)
        sequence = group.live[0]
        manager.allocate(sequence, len(tokens), manager.find_prefix(group, sequence, len(tokens)))
        manager.end_planning()
        sequence.num_computed_tokens = len(tokens)
        manager.publish(sequence, PLAIN)
        return sequence

    def cached(self, tokens: list[int], num_blocks: int = 8) -> BlockManager:
        manager = make_manager(num_blocks)
        manager.free(self.compute(manager, tokens))
        return manager

    def test_a_pinned_prefix_outlives_the_demand_until_its_time_is_over(self) -> None:
        manager = self.cached([1, 2, 3, 4, 5, 6, 7, 8])
        pinned = manager.pins.pin([1, 2, 3, 4, 5, 6, 7, 8, 9], PLAIN, until=10.0)
        assert pinned == PinnedPrefix(
            num_tokens=8, num_cached_tokens=8, because="only full blocks are kept, of 4 tokens each"
        )
        thief = SequenceGroup(make_request("thief", [7] * 24), 0, 3).live[0]
        manager.allocate(thief, 24, PrefixHit())
        assert only(manager).pool.num_free_blocks == 0
        check_blocks(manager, [thief])
        manager.pins.expire(9.0)
        assert only(manager).pool.num_free_blocks == 0
        manager.pins.expire(10.0)
        assert only(manager).pool.num_free_blocks == 2
        check_blocks(manager, [thief])

    def test_a_pin_before_the_first_request_holds_what_it_computes(self) -> None:
        manager = make_manager(8)
        assert manager.pins.pin(list(range(8)), PLAIN, until=10.0) == PinnedPrefix(num_tokens=8)
        assert only(manager).pool.num_used_blocks == 0
        sequence = self.compute(manager, [*range(8), 50])
        check_blocks(manager, [sequence])
        manager.free(sequence)
        assert only(manager).pool.num_used_blocks == 2
        check_blocks(manager, [])
        thief = allocate(manager, 24, seq_id=7)
        assert only(manager).pool.num_free_blocks == 0
        manager.free(thief)
        assert manager.pins.pin(list(range(8)), PLAIN, until=10.0).num_cached_tokens == 8

    def test_a_block_that_was_evicted_is_held_again_when_it_is_computed_again(self) -> None:
        manager = self.cached(list(range(8)), num_blocks=4)
        manager.free(allocate(manager, 12, seq_id=7))
        assert manager.pins.pin(list(range(8)), PLAIN, until=10.0) == PinnedPrefix(num_tokens=8, num_cached_tokens=4)
        manager.free(self.compute(manager, list(range(8)), seq_id=8))
        check_blocks(manager, [])
        assert only(manager).pool.num_used_blocks == 2

    def test_the_same_prefix_again_has_its_new_time(self) -> None:
        manager = self.cached(list(range(8)))
        manager.pins.pin(list(range(8)), PLAIN, until=10.0)
        manager.pins.pin(list(range(8)), PLAIN, until=20.0)
        manager.pins.expire(19.0)
        assert only(manager).pool.num_used_blocks == 2
        manager.pins.expire(20.0)
        assert only(manager).pool.num_used_blocks == 0

    def test_pins_take_at_most_half_of_the_pool(self) -> None:
        manager = self.cached(list(range(32)))
        assert manager.pins.pin(list(range(32)), PLAIN, until=1.0) == PinnedPrefix(
            num_tokens=16,
            num_cached_tokens=16,
            because="pins may take half of the 8 KV blocks, and this one has no more of them",
        )
        assert manager.pins.pin([9] * 8, PLAIN, until=1.0).num_tokens == 0
        assert manager.pins.pin(list(range(16)), PLAIN, until=1.0).num_tokens == 16
        check_blocks(manager, [])

    def test_what_is_shorter_than_a_block_cannot_be_pinned(self) -> None:
        manager = make_manager()
        assert manager.pins.pin([1, 2, 3], PLAIN, until=1.0).because == "only full blocks are kept, of 4 tokens each"
        assert not manager.pins.unpin([1, 2, 3], PLAIN)

    def test_a_reset_takes_pins_too(self) -> None:
        manager = self.cached([1, 2, 3, 4])
        assert manager.pins.pin([1, 2, 3, 4], PLAIN, until=1.0).num_cached_tokens == 4
        assert manager.reset_prefix_cache()
        assert not manager.pins.unpin([1, 2, 3, 4], PLAIN)
        assert only(manager).pool.num_free_blocks == 8
