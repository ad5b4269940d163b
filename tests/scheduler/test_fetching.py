"""Prefixes that come from somewhere else: requests wait for them without being in the way of others."""

from __future__ import annotations

import pytest

from octavo.core.sequence import SequenceStatus
from octavo.engine.engine_core import EngineCore
from tests.fakes.accounting import check_scheduler
from tests.fakes.engine import Collected, make_core, make_request, run, run_alone
from tests.fakes.executor import HashExecutor
from tests.fakes.prefix_source import ToySource


def make(fail_share: float = 0.0, most_steps: int = 3, **options: object) -> tuple[EngineCore, HashExecutor, ToySource]:
    source = ToySource(fail_share, most_steps)
    core = make_core(block_size=4, source=source, **options)  # type: ignore[arg-type]
    assert isinstance(core.executor, HashExecutor)
    source.executor, source.block_manager = core.executor, core.scheduler.block_manager
    return core, core.executor, source


@pytest.mark.parametrize("window", [None, 6, (None, 6)])
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("num_tokens", [29, 30, 32, 33])
def test_what_was_fetched_is_not_computed_and_found_again(window: object, depth: int, num_tokens: int) -> None:
    core, executor, source = make(sliding_window=window, depth=depth)
    request = make_request("a", range(num_tokens), max_tokens=5)
    source.learn(request)
    expected = run_alone(request, window).token_ids["a"]  # type: ignore[arg-type]
    assert run(core, [request]).token_ids["a"] == expected
    assert source.num_fetched == 1
    assert not source.requests
    # the last token of the prompt is computed, whether it is in a full block or not
    assert executor.num_computed_tokens == 1 + 4
    again = make_request("b", range(num_tokens), max_tokens=5)
    seen = run(core, [again])
    assert seen.token_ids["b"] == expected
    assert (source.num_fetched, seen.finals["b"].num_cached_tokens) == (1, num_tokens - 1)


def test_what_the_local_cache_has_is_not_fetched() -> None:
    core, _, source = make()
    run(core, [make_request("short", range(9), max_tokens=1)])
    request = make_request("long", range(30), max_tokens=5)
    source.learn(request)
    seen = run(core, [request])
    assert seen.finals["long"].num_cached_tokens == 8
    assert source.num_fetched == 1
    assert seen.token_ids == run_alone(request).token_ids


def test_a_failed_fetch_is_computed() -> None:
    core, executor, source = make(fail_share=1.0)
    request = make_request("a", range(30), max_tokens=5)
    source.learn(request)
    assert run(core, [request]).token_ids == run_alone(request).token_ids
    assert (source.num_failed, source.num_fetched) == (1, 0)
    assert executor.num_computed_tokens == 30 + 4


def test_others_run_while_a_request_waits_for_its_blocks() -> None:
    core, executor, source = make(most_steps=50)
    far, near = make_request("far", range(30), max_tokens=5), make_request("near", [40, 41], max_tokens=3)
    source.learn(far)
    for request in (far, near):
        core.add_request(request)
    while "near" in core.scheduler.groups:
        core.step()
    assert core.scheduler.groups["far"].status is SequenceStatus.FETCHING
    first, *others = executor.steps
    assert (len(first.rows), first.connector) == (1, None)
    assert [len(step.rows) for step in others if step.connector is None] == [1] * len(others[1:])
    assert run(core).token_ids["far"] == run_alone(far).token_ids["far"]


def test_blocks_of_an_aborted_request_stay_used_until_its_fetch_has_ended() -> None:
    core, _, source = make(most_steps=50)
    request = make_request("a", range(30), max_tokens=5)
    source.learn(request)
    core.add_request(request)
    core.step()
    manager = core.scheduler.block_manager
    core.abort_requests(["a"])
    check_scheduler(core.scheduler)
    assert manager.num_used_blocks == 8
    assert not core.reset_prefix_cache()
    while source.is_busy:
        core.step()
    assert manager.num_used_blocks == 0
    check_scheduler(core.scheduler)


def test_a_fetch_spoils_no_blocks_that_its_step_swaps_out() -> None:
    core, _, source = make(num_blocks=12, policy="priority", preemption_mode="swap", num_host_blocks=20)
    low, high = make_request("low", range(50, 79), max_tokens=12), make_request("high", range(30), max_tokens=5)
    low.priority = 1
    source.learn(high)
    core.add_request(low)
    seen = Collected()
    for _ in range(3):
        seen.add(core.step().outputs)
    run(core, [high], collected=seen)
    assert (core.stats().num_preemptions_by_swap, source.num_fetched) == (1, 1)
    assert seen.token_ids == run_alone(low).token_ids | run_alone(high).token_ids


def test_a_request_waits_for_the_blocks_of_an_aborted_fetch_when_nothing_else_runs() -> None:
    core, _, source = make(num_blocks=10, most_steps=50)
    first, second = make_request("a", range(30), max_tokens=5), make_request("b", range(10, 40), max_tokens=5)
    source.learn(first)
    core.add_request(first)
    core.step()
    core.abort_requests(["a"])
    core.add_request(second)
    core.step()
    assert core.is_waiting
    assert run(core).token_ids == run_alone(second).token_ids


def test_what_others_read_ends_when_nothing_else_can_run() -> None:
    core, _, source = make(num_blocks=10)
    first, second = make_request("a", range(30), max_tokens=2), make_request("b", range(10, 40), max_tokens=2)
    run(core, [first])
    source.hold(first, 1)
    check_scheduler(core.scheduler)
    assert not core.reset_prefix_cache()
    assert run(core, [second]).token_ids == run_alone(second).token_ids
    assert not source.holders
    assert core.reset_prefix_cache()


def test_a_request_with_several_sequences_fetches_before_it_forks_and_not_after() -> None:
    core, executor, source = make()
    request = make_request("a", range(30), max_tokens=5, n=3)
    source.learn(request)
    seen = run(core, [request])
    assert seen.token_ids == run_alone(request).token_ids
    assert seen.finals["a"].num_fetched_tokens == 29
    assert executor.num_computed_tokens == 1 + 3 * 4
    assert source.num_fetched == 1


@pytest.mark.parametrize("num_tokens", [5, 29, 32])
@pytest.mark.parametrize("chunked", [True, False])
def test_what_another_request_fetches_is_not_sent_twice(num_tokens: int, chunked: bool) -> None:
    core, _, source = make(most_steps=9, enable_chunked_prefill=chunked, max_num_batched_tokens=64)
    requests = [make_request(name, range(num_tokens), max_tokens=5) for name in "abc"]
    requests.append(make_request("longer", range(num_tokens + 9), max_tokens=5))
    for request in requests:
        request.prefill = "somewhere:1"
    source.learn(requests[0])
    other = make_request("other", [40, 41], max_tokens=2)  # is not delayed
    seen = run(core, [*requests, other])
    for request in requests:
        assert seen.token_ids[request.request_id] == run_alone(request).token_ids[request.request_id]
    assert [seen.finals[name].num_cached_tokens for name in "abc"] == [0, num_tokens - 1, num_tokens - 1]
    assert seen.finals["longer"].num_cached_tokens == num_tokens // 4 * 4
    assert source.num_fetched == 1
    assert next(iter(seen.finals)) == "other"


@pytest.mark.parametrize("engine", [None, "elsewhere:2"])
def test_a_request_waits_for_no_fetch_from_another_engine(engine: str | None) -> None:
    core, _, source = make(most_steps=50)
    first, second = (make_request(name, range(30), max_tokens=1) for name in "ab")
    first.prefill, second.prefill = "somewhere:1", engine
    source.learn(first)
    run(core, [first, second])
    assert source.num_fetched == 2


def test_the_next_one_fetches_when_the_fetch_of_a_request_ends_with_it() -> None:
    core, _, source = make(most_steps=50)
    first, second = (make_request(name, range(30), max_tokens=5) for name in "ab")
    first.prefill = second.prefill = "somewhere:1"
    source.learn(first)
    for request in (first, second):
        core.add_request(request)
    core.step()
    core.abort_requests(["a"])
    assert run(core).token_ids["b"] == run_alone(second).token_ids["b"]
    assert source.num_fetched == 2
