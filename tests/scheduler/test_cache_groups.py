"""Layers that keep a window beside layers that keep all: each cache group has its own blocks, and results are exact."""

from __future__ import annotations

import pytest

from octavo.config.schema import PreemptionMode
from octavo.core.arithmetic import num_blocks_for, num_blocks_touched
from octavo.engine.engine_core import EngineCore
from tests.fakes.engine import make_core, make_request, run, run_alone

WINDOW, BLOCK, BUDGET = 8, 4, 8
LIVE_BLOCKS = num_blocks_touched(WINDOW - 1 + BUDGET, BLOCK)
BOTH = (None, WINDOW)


def used_blocks(core: EngineCore) -> list[int]:
    return [cache.pool.num_used_blocks for cache in core.scheduler.block_manager.groups]


def test_the_windowed_group_holds_a_window_and_a_step_and_the_other_everything() -> None:
    core = make_core(num_blocks=(64, LIVE_BLOCKS), block_size=BLOCK, max_num_batched_tokens=BUDGET, sliding_window=BOTH)
    request = make_request("a", range(40), max_tokens=40)
    core.add_request(request)
    most = [0, 0]
    while core.has_unfinished():
        core.step()
        most = [max(pair) for pair in zip(most, used_blocks(core), strict=True)]
    assert most[0] == num_blocks_for(79, BLOCK)
    assert most[1] <= LIVE_BLOCKS
    assert core.stats().num_preemptions == 0
    assert core.stats().num_blocks == 64 + LIVE_BLOCKS


def test_a_prefix_is_found_where_every_group_has_it() -> None:
    core = make_core(num_blocks=(64, 12), block_size=BLOCK, max_num_batched_tokens=48, sliding_window=BOTH)
    run(core, [make_request("a", range(41), max_tokens=1)])
    again = make_request("b", [*range(41), 7, 8, 9], max_tokens=1)
    seen = run(core, [again])
    assert seen.finals["b"].num_cached_tokens == 40
    assert seen.token_ids == run_alone(again, BOTH).token_ids
    # the windowed group needs its blocks for others: the full one alone is no hit
    run(core, [make_request("c", range(100, 145), max_tokens=1)])
    seen = run(core, [again])
    assert seen.finals["b"].num_cached_tokens == 0
    assert seen.finals["b"].cache_miss_reason == (
        "layers with a window of 8 tokens have lost blocks between tokens 0 and 40"
    )
    assert seen.token_ids == run_alone(again, BOTH).token_ids


def test_what_is_found_in_one_group_is_not_given_up_for_the_blocks_of_another() -> None:
    core = make_core(
        num_blocks=(64, 64), block_size=BLOCK, max_num_batched_tokens=48, sliding_window=BOTH, prefix_cache_size=0
    )
    run(core, [make_request("a", range(41), max_tokens=1)])
    again = make_request("b", [*range(41), *range(60, 90)], max_tokens=4)  # takes fresh blocks beside what it finds
    seen = run(core, [again])
    assert seen.finals["b"].num_cached_tokens == 40
    assert seen.token_ids == run_alone(again, BOTH).token_ids


def test_a_request_is_refused_by_the_group_that_it_does_not_fit() -> None:
    core = make_core(num_blocks=(8, 64), block_size=BLOCK, max_num_batched_tokens=BUDGET, sliding_window=BOTH)
    error = core.scheduler.refusal(make_request("a", range(30), max_tokens=10))
    assert error is not None
    assert "needs 10 KV blocks of 4 tokens (30 of prompt, 1 × 10 of output), but the cache has 8" in error.message


@pytest.mark.parametrize("mode", ["recompute", "swap"])
@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("num_blocks", [(24, 64), (64, 10)], ids=["the full group is short", "the windowed group is"])
def test_preempted_requests_find_their_groups(mode: PreemptionMode, depth: int, num_blocks: tuple[int, int]) -> None:
    core = make_core(
        num_blocks=num_blocks, block_size=BLOCK, max_num_batched_tokens=BUDGET, sliding_window=BOTH,
        preemption_mode=mode, num_host_blocks=64, depth=depth,
    )  # fmt: skip
    kinds: list[dict[str, object]] = [{}, {"n": 2}, {"n": 2, "use_beam_search": True}, {}]
    requests = [make_request(f"r{i}", range(i, 6 * i + 9), max_tokens=20, seed=i, **kinds[i % 4]) for i in range(8)]
    seen = run(core, requests)
    stats = core.stats()
    assert stats.num_preemptions > 0 or num_blocks[1] < num_blocks[0]
    assert (stats.num_preemptions_by_swap > 0) == (stats.num_preemptions > 0 and mode == "swap")
    for request in requests:
        name = request.request_id
        assert seen.token_ids[name] == run_alone(request, BOTH).token_ids[name]


def test_a_pin_holds_its_prefix_in_every_group() -> None:
    core = make_core(num_blocks=(32, 16), block_size=BLOCK, max_num_batched_tokens=48, sliding_window=BOTH)
    run(core, [make_request("a", range(17), max_tokens=1)])
    assert core.pin_prefix(list(range(16)), 1e9).num_cached_tokens == 16
    assert used_blocks(core) == [4, 4]
    assert core.pin_prefix(list(range(100, 148)), 1e9).because == (
        "pins may take half of the 16 KV blocks, and this one has no more of them"
    )
    assert core.scheduler.block_manager.pins.clear() == 8


def test_a_prompt_of_ten_windows_takes_no_other_prompt_s_prefix_from_the_windowed_group() -> None:
    core = make_core(num_blocks=(64, 12), block_size=BLOCK, max_num_batched_tokens=BUDGET, sliding_window=BOTH)
    run(core, [make_request("a", range(21), max_tokens=1)])
    core.add_request(make_request("b", range(100, 180), max_tokens=1))
    most = 0
    while core.has_unfinished():
        core.step()
        most = max(most, used_blocks(core)[1])
    assert most <= LIVE_BLOCKS
    seen = run(core, [again := make_request("c", [*range(21), 7, 8, 9], max_tokens=1)])
    assert seen.finals["c"].num_cached_tokens == 20
    assert seen.token_ids == run_alone(again, BOTH).token_ids
