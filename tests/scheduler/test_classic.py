"""The classic policy's decision tree, case by case. In brackets: what the policy of vLLM's first engine does there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from octavo.core.step import SchedulerOutput
from octavo.engine.engine_core import EngineCore
from tests.fakes.engine import Collected, make_core, make_request, run, run_alone
from tests.fakes.executor import HashExecutor


def classic(**options: Any) -> EngineCore:
    return make_core(**({"enable_chunked_prefill": False, "max_num_batched_tokens": 16} | options))


def step(core: EngineCore) -> SchedulerOutput:
    """The step that the core makes next."""
    assert isinstance(core.executor, HashExecutor)
    before = len(core.executor.steps)
    core.step()
    assert len(core.executor.steps) == before + 1, "nothing was planned"
    return core.executor.steps[-1]


def rows(core: EngineCore) -> list[int]:
    return [row.num_tokens for row in step(core).rows]


def names(groups: Any) -> list[str]:
    return [group.request_id for group in groups]


def waiting_prompt_and_running_decode() -> tuple[EngineCore, list[int]]:
    core = classic()
    core.add_request(make_request("a", range(4)))
    core.step()
    core.add_request(make_request("b", range(10, 15)))
    return core, [5]


def prompts_until_the_token_budget() -> tuple[EngineCore, list[int]]:
    core = classic()
    for name, length in (("a", 9), ("b", 7), ("c", 1)):
        core.add_request(make_request(name, range(length)))
    return core, [9, 7]


def a_prompt_that_does_not_fit_the_rest_of_the_budget_stops_the_queue() -> tuple[EngineCore, list[int]]:
    core = classic()
    for name, length in (("a", 9), ("b", 8), ("c", 1)):
        core.add_request(make_request(name, range(20, 20 + length)))
    return core, [9]


def sequences_until_max_num_seqs() -> tuple[EngineCore, list[int]]:
    core = classic(max_num_seqs=3)
    for name, n in (("a", 2), ("b", 2), ("c", 1)):
        core.add_request(make_request(name, [ord(name)], n=n))
    return core, [1]


def no_block_for_the_prompt_so_those_that_run_go_on() -> tuple[EngineCore, list[int]]:
    core = classic(num_blocks=4)
    core.add_request(make_request("a", range(10), max_tokens=6))
    core.step()
    core.add_request(make_request("b", range(20, 28), max_tokens=2))
    return core, [1]


@pytest.mark.parametrize(
    "case",
    [
        waiting_prompt_and_running_decode,
        prompts_until_the_token_budget,
        a_prompt_that_does_not_fit_the_rest_of_the_budget_stops_the_queue,
        sequences_until_max_num_seqs,
        no_block_for_the_prompt_so_those_that_run_go_on,
    ],
    ids=lambda case: case.__name__,
)
def test_a_step_is_all_prefill_or_all_decode(case: Callable[[], tuple[EngineCore, list[int]]]) -> None:
    core, expected = case()
    assert rows(core) == expected
    run(core)


def test_sequences_that_compute_their_tails_again_have_steps_of_their_own() -> None:
    core = classic(enable_prefix_caching=False)
    core.add_request(make_request("other", range(4)))
    core.add_request(make_request("several", range(10, 15), n=2))
    core.step()
    core.step()
    preempted = core.scheduler.groups["several"]
    assert [sequence.num_output_tokens for sequence in preempted.live] == [2, 2]
    core.scheduler._preemption.preempt(preempted)
    assert [rows(core) for _ in range(3)] == [[5], [2, 2], [1, 1, 1]]


def test_what_is_left_of_known_tokens_beyond_the_budget_has_a_step_of_its_own() -> None:
    core = classic(enable_prefix_caching=False)
    core.add_request(make_request("long", range(10, 22), max_tokens=9))
    core.add_request(make_request("other", range(4), max_tokens=20))
    for _ in range(6):
        core.step()
    assert core.scheduler.groups["long"].live[0].num_output_tokens == 6
    core.scheduler._preemption.preempt(core.scheduler.groups["long"])
    assert [rows(core) for _ in range(3)] == [[16], [2], [1, 1]]


def swapped_core() -> EngineCore:
    """Two groups run until the younger is swapped out; a third waits."""
    core = classic(num_blocks=8, num_host_blocks=16, preemption_mode="swap", enable_prefix_caching=False)
    core.add_request(make_request("a", range(8), max_tokens=12))
    core.add_request(make_request("b", range(8, 16), max_tokens=12))
    core.step()
    while not len(core.scheduler.swapped):
        core.step()
    core.add_request(make_request("c", [1], max_tokens=2))
    return core


def test_swapped_groups_come_before_waiting_ones() -> None:
    core = swapped_core()
    order = []
    for _ in range(100):
        made = step(core)
        order += ["swap in"] * bool(made.block_ops.swap_ins)
        order += ["prefill of c"] * any(new.token_ids == [1] for new in made.new_sequences)
        if len(order) == 2:
            break
    assert order == ["swap in", "prefill of c"]
    run(core)


def test_a_step_that_preempted_swaps_nothing_in() -> None:
    core = classic(num_blocks=10, num_host_blocks=30, preemption_mode="swap", enable_prefix_caching=False)
    for i in range(4):
        core.add_request(make_request(f"r{i}", range(i * 4, i * 4 + 4), max_tokens=16))
    seen = Collected()
    run(core, collected=seen)
    assert isinstance(core.executor, HashExecutor)
    moves = [(bool(made.block_ops.swap_outs), bool(made.block_ops.swap_ins)) for made in core.executor.steps]
    assert (True, False) in moves
    assert (False, True) in moves
    assert (True, True) not in moves


@pytest.mark.parametrize(("n", "is_swapped"), [(1, False), (2, True)])
def test_a_single_sequence_is_recomputed_and_several_are_swapped(n: int, is_swapped: bool) -> None:
    core = classic(num_blocks=9, num_host_blocks=30, preemption_mode="classic", enable_prefix_caching=False)
    core.add_request(make_request("old", range(8), max_tokens=14))
    core.add_request(make_request("young", range(8, 14), n=n, max_tokens=14))
    run(core)
    stats = core.stats()
    assert stats.num_preemptions > 0
    assert stats.num_preemptions_by_swap == (stats.num_preemptions if is_swapped else 0)


def test_a_recomputed_group_waits_in_front() -> None:
    core = classic(num_blocks=6, enable_prefix_caching=False)
    core.add_request(make_request("a", range(8), max_tokens=10))
    core.add_request(make_request("b", range(8, 14), max_tokens=10))
    core.step()
    core.add_request(make_request("c", [1], max_tokens=2))
    while not core.stats().num_preemptions:
        core.step()
    head = core.scheduler.waiting.peek(0.0)
    assert head is not None
    assert head.request_id == "b"
    run(core)


def test_known_tokens_beyond_the_budget_take_several_steps_and_are_not_ignored() -> None:
    core = classic(num_blocks=12, max_num_batched_tokens=16, enable_prefix_caching=False)
    requests = [make_request("a", range(14), max_tokens=24), make_request("b", range(20, 34), max_tokens=24)]
    seen = run(core, requests)
    assert core.stats().num_preemptions > 0
    for request in requests:
        assert seen.token_ids[request.request_id] == run_alone(request).token_ids[request.request_id]


def test_a_prompt_beyond_the_budget_is_refused_with_both_numbers() -> None:
    seen = run(classic(), [make_request("long", range(17)), make_request("good", range(3))])
    error = seen.finals["long"].error
    assert error is not None
    assert "17 tokens" in error.message
    assert "max_num_batched_tokens = 16" in error.message
    assert seen.finals["good"].error is None


def test_with_a_delay_factor_prompts_gather_while_others_run() -> None:
    core = classic(delay_factor=3.0)
    core.add_request(make_request("a", range(4), max_tokens=30))
    assert rows(core) == [4]  # nothing runs: no delay
    late = make_request("b", range(20, 23))
    late.arrival_time = 4.0  # the clock counts its readings, two a step; the prefill took two
    core.add_request(late)
    taken = []
    while 3 not in taken:
        taken += rows(core)
    assert taken == [1, 1, 1, 1, 1, 3]
    run(core)


def test_the_delay_counts_from_the_oldest_and_not_from_the_first_of_the_queue() -> None:
    core = classic(delay_factor=3.0, policy="priority", max_num_seqs=16)
    core.add_request(make_request("a", range(4), max_tokens=40))
    core.step()
    old = make_request("old", range(20, 23))
    old.arrival_time, old.priority = 4.0, 9
    core.add_request(old)
    for number in range(7):
        fresh = make_request(f"fresh{number}", range(30, 33), max_tokens=40)
        fresh.arrival_time = 1e9
        core.add_request(fresh)
        core.step()
    assert "old" in names(core.scheduler.running)


@pytest.mark.parametrize(
    ("options", "asked", "running"),
    [
        ({}, [("a", "x", 1), ("b", "y", 1), ("c", "x", 1), ("d", None, 1)], ["a", "c", "d"]),
        ({"max_num_seqs": 2}, [("a", "x", 1), ("b", "y", 2), ("c", "x", 1)], ["a", "c"]),
    ],
    ids=["enough sequences", "too many sequences"],
)
def test_a_group_without_a_slot_for_its_adapter_waits_and_is_passed(
    options: dict[str, int], asked: list[Any], running: list[str]
) -> None:
    core = classic(max_loras=1, **options)
    for name, adapter, n in asked:
        request = make_request(name, [ord(name)], max_tokens=2, n=n)
        request.adapter = adapter
        core.add_request(request)
    core.step()
    assert names(core.scheduler.running) == running
    run(core)


def test_a_swapped_group_without_a_slot_is_passed() -> None:
    core = classic(num_host_blocks=40, preemption_mode="swap", policy="priority", max_loras=1, max_num_seqs=2)
    requests = [make_request("b", range(12), max_tokens=9), make_request("a", range(14), max_tokens=9)]
    better = make_request("better", range(30, 34), max_tokens=9, n=2)
    for request, priority, adapter in zip([*requests, better], (4, 5, 0), ("x", None, "y"), strict=True):
        request.priority, request.adapter = priority, adapter
    for request in requests:
        core.add_request(request)
        core.step()
    core.add_request(better)
    core.step()
    assert names(core.scheduler.running) == ["better"]
    core.step()
    core.stop_sequence("better", 1)
    core.step()
    # there is room for a sequence, and b is first, but its adapter has no slot
    assert names(core.scheduler.running) == ["a", "better"]
    run(core)
