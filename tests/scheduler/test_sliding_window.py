"""Models that see a window of tokens: blocks that left it are free, and requests run in pools that hold no more."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.config.schema import PreemptionMode, SchedulerConfig
from octavo.core.arithmetic import max_blocks_of_group, num_blocks_touched
from tests.fakes.block_manager import only
from tests.fakes.engine import make_core, make_request, run, run_alone

WINDOW, BLOCK, BUDGET = 8, 4, 8
LIVE_BLOCKS = num_blocks_touched(WINDOW - 1 + BUDGET, BLOCK)


def test_a_request_of_ten_windows_runs_in_a_pool_of_a_window_and_a_step() -> None:
    core = make_core(num_blocks=LIVE_BLOCKS, block_size=BLOCK, max_num_batched_tokens=BUDGET, sliding_window=WINDOW)
    request = make_request("a", range(7 * WINDOW), max_tokens=3 * WINDOW)
    assert run(core, [request]).token_ids == run_alone(request, WINDOW).token_ids
    assert core.stats().num_preemptions == 0


def test_a_sequence_holds_no_more_blocks_than_its_window_touches() -> None:
    core = make_core(num_blocks=64, block_size=BLOCK, max_num_batched_tokens=BUDGET, sliding_window=WINDOW)
    core.add_request(make_request("a", range(40), max_tokens=40))
    used = []
    while core.has_unfinished():
        core.step()
        used.append(core.stats().num_used_blocks)
    assert max(used) <= LIVE_BLOCKS
    # a decoding sequence: its window, the next token, and the one before, which could be computed again
    assert max(used[10:]) <= num_blocks_touched(WINDOW + 1, BLOCK)


def test_without_chunked_prefill_all_of_a_prompt_is_in_blocks_at_once() -> None:
    options = {"block_size": BLOCK, "enable_chunked_prefill": False, "sliding_window": WINDOW}
    request = make_request("a", range(40), max_tokens=25)
    core = make_core(num_blocks=16, max_num_batched_tokens=64, **options)  # type: ignore[arg-type]
    assert run(core, [request]).token_ids == run_alone(request, WINDOW).token_ids
    too_small = make_core(num_blocks=15, max_num_batched_tokens=64, **options)  # type: ignore[arg-type]
    refusal = run(too_small, [request]).finals["a"].error
    assert refusal is not None
    assert "16 KV blocks" in refusal.message


def test_two_requests_that_decode_share_a_pool_that_holds_neither_whole() -> None:
    core = make_core(num_blocks=8, block_size=BLOCK, max_num_batched_tokens=BUDGET, sliding_window=WINDOW)
    requests = [make_request(name, range(4), max_tokens=60, seed=seed) for seed, name in enumerate("ab")]
    seen = run(core, requests)
    assert core.stats().num_preemptions == 0
    for request in requests:
        assert seen.token_ids[request.request_id] == run_alone(request, WINDOW).token_ids[request.request_id]


class TestPrefixCache:
    def test_a_hit_needs_only_the_blocks_that_the_next_token_sees(self) -> None:
        core = make_core(num_blocks=16, block_size=BLOCK, max_num_batched_tokens=BUDGET, sliding_window=WINDOW)
        run(core, [make_request("a", range(44), max_tokens=1)])
        # new blocks take the place of those that left the window first
        run(core, [make_request("b", range(100, 120), max_tokens=1)])
        again = make_request("c", [*range(44), 7, 8, 9], max_tokens=1)
        seen = run(core, [again])
        assert seen.finals["c"].num_cached_tokens == 44
        assert seen.token_ids == run_alone(again, WINDOW).token_ids

    def test_a_hole_in_the_window_shortens_the_hit(self) -> None:
        core = make_core(num_blocks=12, block_size=BLOCK, max_num_batched_tokens=48, sliding_window=WINDOW)
        run(core, [make_request("a", range(41), max_tokens=1)])
        manager = core.scheduler.block_manager
        again = make_request("b", range(48), max_tokens=1)
        core.add_request(again)
        group = core.scheduler.groups["b"]
        hit = manager.find_prefix(group, group.live[0], 48)
        assert (len(hit.blocks[0]), hit.num_unseen(0)) == (10, 8)
        # the ninth block goes: the next prefix that has its window ends before it
        gone = only(manager).pool.find(manager.digests(group.live[0])[8])
        assert gone is not None
        only(manager).pool._cached.remove(gone)
        only(manager).pool._forget(gone)
        only(manager).pool._empty.append(gone)
        shorter = manager.find_prefix(group, group.live[0], 48)
        assert (len(shorter.blocks[0]), shorter.num_unseen(0)) == (8, 6)
        assert shorter.missing == manager.digests(group.live[0])[8]
        assert run(core).token_ids == run_alone(again, WINDOW).token_ids


any_request = given(
    window=st.integers(1, 20),
    block_size=st.integers(1, 6),
    max_num_batched_tokens=st.integers(3, 20),
    prompt=st.integers(1, 70),
    max_tokens=st.integers(1, 30),
    width=st.sampled_from([(1, False), (2, False), (3, False), (2, True)]),
    depth=st.integers(1, 3),
    num_lookahead_slots=st.sampled_from([0, 3]),
    enable_prefix_caching=st.booleans(),
)


def check_that_a_request_runs_alone(
    window: int, block_size: int, max_num_batched_tokens: int, prompt: int, max_tokens: int, width: tuple[int, bool],
    depth: int, num_lookahead_slots: int, enable_prefix_caching: bool,
) -> None:  # fmt: skip
    request = make_request("a", range(prompt), n=width[0], use_beam_search=width[1], max_tokens=max_tokens)
    config = SchedulerConfig(
        max_model_len=512,
        max_num_batched_tokens=max_num_batched_tokens,
        max_steps_in_flight=depth,
        num_lookahead_slots=num_lookahead_slots,
    )
    num_blocks = max_blocks_of_group(
        prompt, max_tokens + num_lookahead_slots, width[0], block_size, config.max_live_tokens(window)
    )
    options = {
        "block_size": block_size,
        "max_num_batched_tokens": max_num_batched_tokens,
        "depth": depth,
        "num_lookahead_slots": num_lookahead_slots,
        "enable_prefix_caching": enable_prefix_caching,
        "sliding_window": window,
    }
    core = make_core(num_blocks=num_blocks, **options)  # type: ignore[arg-type]
    seen = run(core, [request], max_steps=400)
    assert seen.token_ids == run_alone(request, window).token_ids
    assert core.stats().num_preemptions == 0
    if num_blocks > 1:
        assert make_core(num_blocks=num_blocks - 1, **options).scheduler.refusal(request) is not None  # type: ignore[arg-type]


@settings(max_examples=50, deadline=None)
@any_request
def test_a_request_runs_alone_in_the_blocks_that_the_door_asks_for(**sizes: Any) -> None:
    check_that_a_request_runs_alone(**sizes)


@pytest.mark.long
@settings(max_examples=500, deadline=None)
@any_request
def test_many_requests_run_alone_in_the_blocks_that_the_door_asks_for(**sizes: Any) -> None:
    check_that_a_request_runs_alone(**sizes)


@pytest.mark.parametrize("preemption_mode", ["recompute", "swap"])
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_requests_preempted_with_steps_in_flight_find_their_window(preemption_mode: PreemptionMode, depth: int) -> None:
    requests = [make_request(f"r{i}", range(i, 6 * i + 3), max_tokens=25, n=1 + i % 2, seed=i) for i in range(5)]
    num_preemptions = num_swaps = 0
    for window in (2, 3, 4, 7, 8, 12, 15):
        config = SchedulerConfig(max_model_len=512, max_num_batched_tokens=9, max_steps_in_flight=depth)
        core = make_core(
            # what the last one needs alone
            num_blocks=max_blocks_of_group(23, 25, 1, 2, config.max_live_tokens(window)) + 2,
            block_size=2,
            max_num_batched_tokens=9,
            sliding_window=window,
            preemption_mode=preemption_mode,
            num_host_blocks=64,
            depth=depth,
        )
        seen = run(core, requests)
        num_preemptions += core.stats().num_preemptions
        num_swaps += core.stats().num_preemptions_by_swap
        for request in requests:
            name = request.request_id
            if core.scheduler.refusal(request) is None:
                assert seen.token_ids[name] == run_alone(request, window).token_ids[name]
    assert num_preemptions > 0
    assert (num_swaps > 0) == (preemption_mode == "swap")
