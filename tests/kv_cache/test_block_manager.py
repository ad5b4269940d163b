"""Admission, growth, sharing and copying of blocks."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from octavo.core.sequence import Sequence, SequenceGroup
from octavo.core.step import BlockCopy
from octavo.kv_cache.block_manager import NO_HIT, UNCHANGED, AllocStatus, BlockManager
from tests.fakes.engine import make_request


def make_group(num_tokens: int, n: int = 1, first_seq_id: int = 1) -> SequenceGroup:
    return SequenceGroup(make_request("r", range(num_tokens), n=n), 0, first_seq_id)


def make_manager(num_blocks: int = 10, block_size: int = 4, watermark: float = 0.0) -> BlockManager:
    return BlockManager(num_blocks, block_size, watermark, enable_prefix_caching=True)


def allocate(manager: BlockManager, num_tokens: int, seq_id: int = 1) -> Sequence:
    sequence = Sequence(seq_id, 0, list(range(num_tokens)), num_tokens)
    manager.allocate(sequence, num_tokens, NO_HIT)
    return sequence


class TestAdmission:
    def test_ok_when_the_blocks_are_there(self) -> None:
        assert make_manager(2).can_allocate(make_group(8), NO_HIT, waive_watermark=False).status is AllocStatus.OK

    def test_never_when_the_whole_pool_is_too_small(self) -> None:
        admission = make_manager(2).can_allocate(make_group(9), NO_HIT, waive_watermark=True)
        assert admission.status is AllocStatus.NEVER
        assert "needs 3 KV blocks, the pool has 2" in admission.because

    def test_never_counts_the_shared_prompt_and_one_tail_for_each_sequence(self) -> None:
        manager = make_manager(5)
        assert manager.can_allocate(make_group(9, n=3), NO_HIT, waive_watermark=True).status is AllocStatus.OK
        assert manager.can_allocate(make_group(9, n=4), NO_HIT, waive_watermark=True).status is AllocStatus.NEVER

    def test_a_tail_that_is_never_written_needs_no_block(self) -> None:
        group = SequenceGroup(make_request("r", range(8), n=3, max_tokens=1), 0, 1)
        assert make_manager(2).can_allocate(group, NO_HIT, waive_watermark=True).status is AllocStatus.OK

    def test_later_while_others_hold_the_blocks(self) -> None:
        manager = make_manager(3)
        other = allocate(manager, 8, seq_id=7)
        assert manager.can_allocate(make_group(8), NO_HIT, waive_watermark=False).status is AllocStatus.LATER
        manager.free(other)
        assert manager.can_allocate(make_group(8), NO_HIT, waive_watermark=False).status is AllocStatus.OK

    def test_the_watermark_keeps_blocks_free_unless_waived(self) -> None:
        manager = make_manager(10, watermark=0.25)
        group = make_group(36)
        assert manager.can_allocate(group, NO_HIT, waive_watermark=False).status is AllocStatus.LATER
        assert manager.can_allocate(group, NO_HIT, waive_watermark=True).status is AllocStatus.OK

    def test_a_hit_that_is_in_use_costs_nothing_and_a_cached_one_costs_a_free_block(self) -> None:
        manager = make_manager(4)
        owner = allocate(manager, 8, seq_id=7)
        owner.num_computed_tokens = 8
        manager.publish(owner, None)
        group = make_group(16)
        hit = manager.find_prefix(group, group.live[0], 16)
        assert len(hit.blocks) == 2
        assert manager.can_allocate(group, hit, waive_watermark=True).status is AllocStatus.OK
        manager.free(owner)
        thief = Sequence(8, 0, [9], 1)
        manager.allocate(thief, 1, NO_HIT)
        assert manager.can_allocate(group, hit, waive_watermark=True).status is AllocStatus.LATER


class TestPrefix:
    def test_the_last_token_is_always_computed(self) -> None:
        manager = make_manager()
        owner = allocate(manager, 8, seq_id=7)
        owner.num_computed_tokens = 8
        manager.publish(owner, None)
        group = make_group(8)
        assert len(manager.find_prefix(group, group.live[0], 8).blocks) == 1

    def test_the_first_missing_block_is_named(self) -> None:
        manager = make_manager()
        group = make_group(9)
        hit = manager.find_prefix(group, group.live[0], 9)
        assert hit.missing == group.live[0].block_hashes[0]

    def test_only_computed_blocks_are_published(self) -> None:
        manager = make_manager()
        owner = allocate(manager, 8, seq_id=7)
        owner.num_computed_tokens = 7
        manager.publish(owner, None)
        group = make_group(12)
        assert len(manager.find_prefix(group, group.live[0], 12).blocks) == 1

    def test_nothing_is_read_or_published_when_caching_is_off(self) -> None:
        manager = BlockManager(10, 4, 0.0, enable_prefix_caching=False)
        owner = allocate(manager, 8, seq_id=7)
        owner.num_computed_tokens = 8
        manager.publish(owner, None)
        group = make_group(12)
        hit = manager.find_prefix(group, group.live[0], 12)
        assert (hit.blocks, hit.because) == ([], "prefix caching is off")
        manager.free(owner)
        assert manager.pool.num_free_blocks == 10


class TestGrowth:
    def test_room_in_the_last_block_changes_nothing(self) -> None:
        manager = make_manager()
        assert manager.append_slots(allocate(manager, 5), 5, 6) is UNCHANGED

    def test_has_slot_is_where_append_slots_would_do_nothing(self) -> None:
        manager = make_manager()
        parent = allocate(manager, 6)
        assert [manager.has_slot(parent, position) for position in (3, 4, 6, 7, 8)] == [False, True, True, True, False]
        child = parent.fork(2, 1)
        manager.fork(parent, child)
        assert not manager.has_slot(parent, 6)
        manager.append_slots(child, 6, 7)
        assert manager.has_slot(child, 6)
        assert manager.has_slot(parent, 6)

    def test_a_full_block_is_followed_by_a_new_one(self) -> None:
        manager = make_manager()
        sequence = allocate(manager, 8)
        growth = manager.append_slots(sequence, 8, 9)
        assert growth is not None
        assert (growth.first_index, len(growth.blocks), growth.copies) == (2, 1, [])

    def test_lookahead_slots_are_counted(self) -> None:
        manager = make_manager()
        sequence = allocate(manager, 6)
        growth = manager.append_slots(sequence, 6, 7, num_lookahead=6)
        assert growth is not None
        assert len(manager.table(sequence)) == 4

    def test_none_and_no_change_when_blocks_are_short(self) -> None:
        manager = make_manager(2)
        sequence = allocate(manager, 8)
        assert manager.append_slots(sequence, 8, 9) is None
        assert len(manager.table(sequence)) == 2
        manager.check([sequence])

    def test_the_first_writer_copies_a_shared_block_and_the_last_keeps_it(self) -> None:
        manager = make_manager()
        parent = allocate(manager, 6)
        child = parent.fork(2, 1)
        manager.fork(parent, child)
        shared = list(manager.table(parent))
        growth = manager.append_slots(child, 6, 7)
        assert growth is not None
        assert growth.copies == [BlockCopy(shared[1], growth.blocks[0])]
        assert growth.first_index == 1
        assert manager.table(child)[0] == shared[0]
        assert manager.append_slots(parent, 6, 7) is UNCHANGED
        manager.check([parent, child])

    def test_a_fork_at_a_block_border_needs_no_copy(self) -> None:
        manager = make_manager()
        parent = allocate(manager, 8)
        child = parent.fork(2, 1)
        manager.fork(parent, child)
        growth = manager.append_slots(child, 8, 9)
        assert growth is not None
        assert growth.copies == []


class TestRollBack:
    def test_tokens_and_the_blocks_that_only_they_are_in_are_taken_back(self) -> None:
        manager = make_manager()
        sequence = allocate(manager, 5)
        sequence.num_computed_tokens = 5
        growth = manager.append_slots(sequence, 5, 6, 8)
        assert growth is not None
        assert len(growth.blocks) == 2
        sequence.num_computed_tokens = 13  # with guesses, none of which holds
        manager.roll_back(sequence, 5)
        assert (sequence.num_computed_tokens, sequence.token_ids) == (5, list(range(5)))
        assert len(manager.table(sequence)) == 2
        manager.check([sequence])

    def test_what_is_written_over_is_found_no_more_and_what_stays_is(self) -> None:
        manager = make_manager()
        sequence = allocate(manager, 12)
        sequence.num_computed_tokens = 12
        manager.publish(sequence, None)
        manager.roll_back(sequence, 6)
        sequence.token_ids += [90, 91]
        sequence.num_computed_tokens = 8
        manager.publish(sequence, None)
        old, new = make_group(13), make_group(13)
        new.live[0].token_ids[6:] = [90, 91, 0, 0]
        assert manager.find_prefix(old, old.live[0], 13).blocks == manager.table(sequence)[:1]
        assert manager.find_prefix(new, new.live[0], 10).blocks == manager.table(sequence)
        manager.check([sequence])

    def test_a_published_block_that_others_share_stays_theirs(self) -> None:
        manager = make_manager()
        sequence = allocate(manager, 8)
        sequence.num_computed_tokens = 8
        manager.publish(sequence, None)
        sibling = sequence.fork(2, 1)
        manager.fork(sequence, sibling)
        manager.roll_back(sequence, 6)
        assert (len(sequence.token_ids), sequence.num_computed_tokens) == (6, 4)
        group = make_group(9)
        assert manager.find_prefix(group, group.live[0], 9).blocks == manager.table(sibling)
        growth = manager.append_slots(sequence, 4, 7)
        assert growth is not None
        assert not set(growth.blocks) & set(manager.table(sibling))
        manager.check([sequence, sibling])


class Blocks(RuleBasedStateMachine):
    """Any order of allocate, append, roll back, fork, publish, free keeps the accounting; no written slot is shared."""

    @initialize(num_blocks=st.integers(1, 12), block_size=st.integers(1, 4), caching=st.booleans())
    def build(self, num_blocks: int, block_size: int, caching: bool) -> None:
        self.manager = BlockManager(num_blocks, block_size, 0.0, caching)
        self.sequences: dict[int, Sequence] = {}
        self.next_id = 1

    @rule(token_ids=st.lists(st.integers(0, 1), min_size=1, max_size=10))
    def allocate(self, token_ids: list[int]) -> None:
        group = SequenceGroup(make_request("r", token_ids), 0, self.next_id)
        sequence = group.live[0]
        hit = self.manager.find_prefix(group, sequence, len(token_ids))
        if self.manager.can_allocate(group, hit, waive_watermark=True).status is AllocStatus.OK:
            self.manager.allocate(sequence, len(token_ids), hit)
            self.manager.end_planning()
            sequence.num_computed_tokens = len(token_ids)
            self.manager.publish(sequence, None)
            self.sequences[sequence.seq_id] = sequence
            self.next_id += 1

    @precondition(lambda self: self.sequences)
    @rule(data=st.data(), count=st.integers(1, 5))
    def append(self, data: st.DataObject, count: int) -> None:
        sequence = data.draw(st.sampled_from(list(self.sequences.values())))
        start = sequence.num_computed_tokens
        free = self.manager.pool.num_free_blocks
        growth = self.manager.append_slots(sequence, start, start + count)
        if growth is None:
            assert self.manager.pool.num_free_blocks == free
            return
        size = self.manager.block_size
        table = self.manager.table(sequence)
        assert len(table) * size >= start + count
        written = table[start // size : (start + count - 1) // size + 1]
        others = {b for s in self.sequences.values() if s is not sequence for b in self.manager.table(s)}
        assert not others & set(written)
        sequence.token_ids += [0] * count
        sequence.num_computed_tokens += count
        self.manager.publish(sequence, None)

    @precondition(lambda self: self.sequences)
    @rule(data=st.data(), count=st.integers(1, 6))
    def roll_back(self, data: st.DataObject, count: int) -> None:
        sequence = data.draw(st.sampled_from(list(self.sequences.values())))
        self.manager.roll_back(sequence, max(1, sequence.num_computed_tokens - count))

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

    @invariant()
    def accounts_agree(self) -> None:
        if hasattr(self, "manager"):
            self.manager.check(self.sequences.values())
            size = self.manager.block_size
            for sequence in self.sequences.values():
                for place, block in enumerate(self.manager.table(sequence)):
                    content = self.manager.pool._contents[block]
                    if content is not None:
                        known = tuple(sequence.token_ids[place * size : (place + 1) * size])
                        assert content.token_ids[: len(known)] == known, "a block is found by what it does not hold"


Blocks.TestCase.settings = settings(max_examples=100, stateful_step_count=20, deadline=None)
TestBlocks = Blocks.TestCase


class TestPrefixCacheByToken:
    """What begins alike is copied; what is pinned stays."""

    def cached(self, tokens: list[int], num_blocks: int = 8) -> BlockManager:
        manager = make_manager(num_blocks)
        group = SequenceGroup(make_request("owner", tokens), 0, 1)
        owner = group.live[0]
        manager.allocate(owner, len(tokens), NO_HIT)
        owner.num_computed_tokens = len(tokens)
        manager.publish(owner, None)
        manager.free(owner)
        return manager

    def test_a_block_that_begins_alike_is_copied_as_far_as_it_is_alike(self) -> None:
        manager = self.cached([1, 2, 3, 4, 5, 6, 7, 8])
        group = SequenceGroup(make_request("r", [1, 2, 3, 4, 5, 6, 9, 9, 9]), 0, 2)
        hit = manager.find_prefix(group, group.live[0], 9)
        assert hit.blocks == [manager.pool.find(group.live[0].block_hashes[0])]
        assert hit.partial[1] == 2
        (copy,) = manager.allocate(group.live[0], 9, hit)
        assert copy.source == hit.partial[0]
        assert copy.target == manager.table(group.live[0])[1]
        assert group.live[0].num_computed_tokens == 6
        # nobody may be given the source before the copy is made
        assert manager.pool.num_users(copy.source) == 1
        manager.end_planning()
        manager.check([group.live[0]])

    def test_the_last_token_is_always_computed(self) -> None:
        manager = self.cached([1, 2, 3, 4, 5, 6, 7, 8])
        group = SequenceGroup(make_request("r", [1, 2, 3, 4, 5, 6]), 0, 2)
        hit = manager.find_prefix(group, group.live[0], 6)
        assert (len(hit.blocks), hit.partial[1]) == (1, 1)

    def test_a_miss_has_a_reason(self) -> None:
        manager = self.cached([1, 2, 3, 4, 5, 6, 7, 8], num_blocks=2)

        def reason(tokens: list[int]) -> str:
            group = SequenceGroup(make_request("r", tokens), 0, 2)
            return manager.find_prefix(group, group.live[0], len(tokens)).because

        assert reason([1, 2, 3, 4, 9, 9, 9, 9, 9]) == "its next block is new"
        thief = SequenceGroup(make_request("thief", [7]), 0, 3).live[0]
        manager.allocate(thief, 1, NO_HIT)
        assert reason([1, 2, 3, 4, 5, 6, 7, 8, 9]) == "its next block was evicted"

    def test_a_pinned_prefix_outlives_the_demand_until_its_time_is_over(self) -> None:
        manager = self.cached([1, 2, 3, 4, 5, 6, 7, 8])
        assert manager.pin([1, 2, 3, 4, 5, 6, 7, 8, 9], None, until=10.0) == 8
        thief = SequenceGroup(make_request("thief", [7] * 24), 0, 3).live[0]
        manager.allocate(thief, 24, NO_HIT)
        assert manager.pool.num_free_blocks == 0
        manager.check([thief])
        assert not manager.unpin(9.0)
        assert manager.unpin(10.0)
        assert manager.pool.num_free_blocks == 2
        manager.check([thief])

    def test_pins_take_at_most_half_of_the_pool(self) -> None:
        manager = self.cached(list(range(32)))
        assert manager.pin(list(range(32)), None, until=1.0) == 16
        assert manager.pin(list(range(32)), None, until=1.0) == 0

    def test_a_reset_takes_pins_too(self) -> None:
        manager = self.cached([1, 2, 3, 4])
        assert manager.pin([1, 2, 3, 4], None, until=1.0) == 4
        assert manager.reset_prefix_cache()
        assert manager.pin([1, 2, 3, 4], None, until=1.0) == 0
