"""The last, partly filled block of a prompt: found by its name and as a beginning, kept, never taken for a full one."""

from __future__ import annotations

import pytest

from octavo.core.cache_key import PLAIN, CacheKey, Placeholder
from octavo.core.sequence import Sequence, SequenceGroup
from octavo.engine.engine_core import EngineCore
from octavo.kv_cache.allocation import PrefixHit
from octavo.kv_cache.block_hash import extend_chain, next_digest
from octavo.kv_cache.block_manager import BlockManager
from tests.fakes.accounting import check_blocks, check_scheduler
from tests.fakes.block_manager import make_manager, only, table
from tests.fakes.engine import make_core, make_request, run, run_alone
from tests.fakes.executor import HashExecutor


def kept_core(**options: object) -> EngineCore:
    return make_core(block_size=4, **options)  # type: ignore[arg-type]


def compute(manager: BlockManager, tokens: list[int], seq_id: int, key: CacheKey = PLAIN) -> Sequence:
    """A sequence whose prompt is computed and published with its tail."""
    sequence = Sequence(seq_id, 0, list(tokens), len(tokens))
    manager.allocate(sequence, len(tokens), PrefixHit())
    sequence.num_computed_tokens = len(tokens)
    manager.publish(sequence, key)
    manager.publish_tail(sequence, key)
    return sequence


def find(manager: BlockManager, tokens: list[int]) -> PrefixHit:
    group = SequenceGroup(make_request("r", tokens), 0, 99)
    hit = manager.find_prefix(group, group.live[0], len(tokens))
    manager.free(group.live[0])
    return hit


def test_names_of_a_prompt_end_with_that_of_its_tail() -> None:
    manager = make_manager()
    tokens = list(range(10))
    sequence = compute(manager, tokens, 1)
    chain = extend_chain([], tokens, 4, PLAIN)
    assert manager.transfer_digests(sequence, PLAIN) == [*chain, next_digest(chain[1], [8, 9])]
    sequence.token_ids += [5, 6, 7]  # what was drawn is no part of it
    assert manager.transfer_digests(sequence, PLAIN) == [*chain, next_digest(chain[1], [8, 9])]
    assert manager.transfer_digests(Sequence(2, 0, tokens[:8], 8), PLAIN) == chain
    short = manager.transfer_digests(Sequence(3, 0, tokens[:3], 3), CacheKey("salt"))
    assert len(short) == 1
    assert short != manager.transfer_digests(Sequence(4, 0, tokens[:3], 3), PLAIN)
    cat = CacheKey(placeholders=(Placeholder(1, 2, b"c" * 32),))
    assert manager.transfer_digests(Sequence(5, 0, tokens[:3], 3), cat) != short


def test_a_tail_is_found_as_a_beginning_and_never_as_a_full_block() -> None:
    manager = make_manager()
    sequence = compute(manager, list(range(10)), 1)
    tail = manager.transfer_digests(sequence, PLAIN)[-1]
    assert only(manager).pool.find(tail) == table(manager, sequence)[2]
    hit = find(manager, [*range(10), 50, 51, 52])
    assert (hit.num_blocks, hit.num_copied_tokens, hit.sources) == (2, 2, [table(manager, sequence)[2]])
    # the sequence fills the block: its name stays that of the tail
    manager.append_slots(sequence, 10, 12)
    sequence.token_ids += [10, 11]
    sequence.num_computed_tokens = 12
    manager.publish(sequence, PLAIN)
    hit = find(manager, [*range(12), 50])
    assert (hit.num_blocks, hit.num_copied_tokens) == (2, 2)
    manager.free(sequence)
    check_blocks(manager, [])


def test_a_prompt_that_is_not_computed_or_fills_its_blocks_has_no_tail() -> None:
    manager = make_manager()
    sequence = Sequence(1, 0, list(range(10)), 10)
    manager.allocate(sequence, 10, PrefixHit())
    sequence.num_computed_tokens = 9
    manager.publish(sequence, PLAIN)
    manager.publish_tail(sequence, PLAIN)
    assert only(manager).pool.find(manager.transfer_digests(sequence, PLAIN)[-1]) is None
    full = compute(manager, list(range(20, 28)), 2)
    assert only(manager).pool.find(manager.transfer_digests(full, PLAIN)[-1]) == table(manager, full)[1]
    check_blocks(manager, [sequence, full])


def test_several_tails_follow_one_prefix_and_the_longest_common_beginning_is_copied() -> None:
    manager = make_manager()
    sequences = [compute(manager, [1, 2, 3, 4, *rest], i) for i, rest in enumerate([[5], [5, 6], [7, 8, 9]])]
    blocks = [table(manager, sequence)[1] for sequence in sequences]
    assert find(manager, [1, 2, 3, 4, 5, 6, 7, 8]).sources == [blocks[1]]
    assert find(manager, [1, 2, 3, 4, 7, 8, 0, 0]).sources == [blocks[2]]
    assert find(manager, [1, 2, 3, 4, 5, 0]).sources == [blocks[0]]
    for sequence in sequences:
        manager.free(sequence)
    check_blocks(manager, [])
    thief = Sequence(10, 0, [0] * 40, 40)
    manager.allocate(thief, 40, PrefixHit())
    check_blocks(manager, [thief])
    manager.free(thief)
    assert find(manager, [1, 2, 3, 4, 5, 6, 7, 8]).num_tokens == 0


def test_a_sequence_that_went_wrong_loses_its_tail() -> None:
    manager = make_manager()
    sequence = compute(manager, list(range(10)), 1)
    names = manager.transfer_digests(sequence, PLAIN)
    manager.pins.keep(names, 5.0)
    manager.invalidate(sequence, 4)
    assert [only(manager).pool.find(name) for name in names] == [table(manager, sequence)[0], None, None]
    check_blocks(manager, [sequence])


def test_a_pin_of_a_prompt_that_is_kept_never_shortens_another() -> None:
    manager = make_manager()
    sequence = compute(manager, list(range(8)), 1)
    manager.free(sequence)
    manager.pins.pin(list(range(8)), PLAIN, until=100.0)
    manager.pins.keep(manager.transfer_digests(sequence, PLAIN), 5.0)
    manager.pins.expire(99.0)
    assert only(manager).pool.num_used_blocks == 2
    manager.pins.expire(100.0)
    assert only(manager).pool.num_used_blocks == 0


@pytest.mark.parametrize("window", [None, 6, (None, 6)])
@pytest.mark.parametrize("options", [{}, {"n": 3}, {"n": 2, "best_of": 2, "use_beam_search": True}])
@pytest.mark.parametrize("depth", [1, 2])
def test_a_kept_prompt_is_pinned_with_its_tail_and_the_next_one_computes_one_token(
    window: object, options: dict[str, object], depth: int
) -> None:
    core = kept_core(sliding_window=window, depth=depth)
    request = make_request("a", range(30), max_tokens=1, **options)
    request.keep_s = 10.0
    run(core, [request])
    manager = core.scheduler.block_manager
    names = manager.transfer_digests(Sequence(99, 0, list(range(30)), 30), PLAIN)
    assert all(cache.pool.find(name) is not None for cache in manager.groups for name in names)
    assert manager.num_used_blocks == 8 * len(manager.groups)
    check_scheduler(core.scheduler)
    assert isinstance(core.executor, HashExecutor)
    before = core.executor.num_computed_tokens
    again = make_request("b", range(30), max_tokens=1)
    assert run(core, [again]).token_ids == run_alone(again, window).token_ids  # type: ignore[arg-type]
    assert core.executor.num_computed_tokens == before + 1
    manager.pins.expire(1e9)
    assert manager.num_used_blocks == 0


def test_a_prompt_is_kept_from_its_end_on_and_not_when_it_was_aborted() -> None:
    core = kept_core(max_num_batched_tokens=16)
    request = make_request("a", range(30), max_tokens=1)
    request.keep_s = 10.0
    core.add_request(request)
    core.step()
    core.abort_requests(["a"])
    assert core.scheduler.block_manager.num_used_blocks == 0
    run(core, [request])
    ended = core.scheduler.timelines[-1].events[-1][0]
    core.scheduler.block_manager.pins.expire(ended + 9.0)
    assert core.scheduler.block_manager.num_used_blocks == 8
    core.scheduler.block_manager.pins.expire(ended + 10.0)
    assert core.scheduler.block_manager.num_used_blocks == 0
