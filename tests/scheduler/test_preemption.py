"""Giving way by swapping, by recomputation, and by what costs less."""

from __future__ import annotations

from typing import Any

import pytest

from octavo.engine.engine_core import EngineCore
from octavo.scheduler.budget import TokenBudget
from octavo.scheduler.plan import StepPlan
from octavo.scheduler.policies.fair_share import FairShare
from octavo.scheduler.rates import PreemptionCosts
from tests.fakes.engine import Collected, make_core, make_request, run, run_alone
from tests.fakes.executor import HashExecutor


def pressed(**options: Any) -> EngineCore:
    tight = {"num_blocks": 10, "num_host_blocks": 40, "enable_prefix_caching": False, "max_num_batched_tokens": 64}
    return make_core(**(tight | options))


def run_two(core: EngineCore, n: int = 1) -> Collected:
    requests = [make_request("a", range(12), max_tokens=16), make_request("b", range(20, 30), n=n, max_tokens=10)]
    seen = run(core, requests)
    for request in requests:
        alone = run_alone(request)
        assert seen.token_ids[request.request_id] == alone.token_ids[request.request_id]
        assert seen.logprobs[request.request_id] == alone.logprobs[request.request_id]
    return seen


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("n", [1, 2])
def test_a_swapped_group_goes_on_where_it_was(n: int, depth: int) -> None:
    core = pressed(preemption_mode="swap", depth=depth)
    run_two(core, n)
    stats = core.stats()
    assert stats.num_preemptions == stats.num_preemptions_by_swap > 0
    assert stats.num_swapped_out_blocks == stats.num_swapped_in_blocks > 0
    assert stats.num_recomputed_tokens == 0


def test_a_shared_block_moves_once() -> None:
    core = pressed(preemption_mode="swap")
    run_two(core, n=2)
    assert isinstance(core.executor, HashExecutor)
    outs = [made.block_ops.swap_outs for made in core.executor.steps if made.block_ops.swap_outs]
    ins = [made.block_ops.swap_ins for made in core.executor.steps if made.block_ops.swap_ins]
    for moves in outs + ins:
        assert len({move.source for move in moves}) == len({move.target for move in moves}) == len(moves)
    assert sum(map(len, outs)) == sum(map(len, ins))
    # two tails of at most three blocks beside two whole blocks of the prompt
    assert max(map(len, outs)) <= 2 + 2 * 3


def test_without_room_on_the_host_a_group_is_recomputed() -> None:
    core = pressed(preemption_mode="swap", num_host_blocks=1)
    run_two(core)
    assert core.stats().num_preemptions > 0
    assert core.stats().num_preemptions_by_swap == 0
    reasons = [entry.because for entry in core.scheduler.log.entries if entry.kind == "preempted"]
    assert all("the swap space needs" in reason and "1 are free" in reason for reason in reasons)


@pytest.mark.parametrize(
    ("costs", "is_swapped"),
    [
        (PreemptionCosts(prefill_tokens_per_s=1.0, swap_bytes_per_s=1e9), True),
        (PreemptionCosts(prefill_tokens_per_s=1e9, swap_bytes_per_s=1.0), False),
    ],
)
def test_auto_takes_what_costs_less_and_says_both_numbers(costs: PreemptionCosts, is_swapped: bool) -> None:
    core = pressed(preemption_mode="auto", costs=costs)
    run_two(core)
    stats = core.stats()
    assert stats.num_preemptions_by_swap == (stats.num_preemptions if is_swapped else 0)
    reasons = [entry.because for entry in core.scheduler.log.entries if entry.kind == "preempted"]
    assert all("to compute again" in reason and "to move" in reason for reason in reasons)


def test_a_group_between_pool_minus_watermark_and_pool_does_not_wait_for_ever() -> None:
    core = pressed(preemption_mode="swap", num_blocks=7, watermark=0.5)
    requests = [make_request("a", range(8), max_tokens=20), make_request("b", range(20, 28), max_tokens=20)]
    seen = run(core, requests)
    assert core.stats().num_preemptions_by_swap > 0
    for request in requests:
        assert seen.token_ids[request.request_id] == run_alone(request).token_ids[request.request_id]


@pytest.mark.parametrize("mode", ["recompute", "swap", "classic", "auto"])
def test_a_pool_that_is_far_too_small_still_finishes_and_recomputes_within_bounds(mode: str) -> None:
    core = make_core(num_blocks=8, num_host_blocks=12, preemption_mode=mode, max_num_batched_tokens=32, max_num_seqs=16)
    requests = [make_request(f"r{i}", range(i, i + 6), max_tokens=20) for i in range(16)]
    seen = run(core, requests)
    assert len(seen.finals) == 16
    # once for each request, and from then on others grow by as much as is computed again
    assert core.stats().num_recomputed_tokens <= 16 * (6 + 20) + 2 * 16 * 20


def test_who_comes_back_a_second_time_leaves_others_room_to_grow() -> None:
    core = make_core(num_blocks=60, max_num_batched_tokens=512, max_num_seqs=32, enable_prefix_caching=False)
    requests = [make_request(f"r{i}", [i] * 3, max_tokens=10 + 3 * i) for i in range(16)]
    requests.append(make_request("long", [3] * 100, max_tokens=20))
    run(core, requests)
    entries = [each for each in core.scheduler.log.entries if each.request_id == "long"]
    assert [each.kind for each in entries].count("preempted") == 2
    assert "needs 29 free KV blocks, 45 are free, 29 stay free" in [each.because for each in entries]


def test_a_swapped_group_waits_for_a_slot_for_its_adapter() -> None:
    core = pressed(preemption_mode="swap", policy="priority", max_loras=1)
    first, gives_way = make_request("a", range(12), max_tokens=16), make_request("b", range(20, 30), max_tokens=10)
    gives_way.adapter, gives_way.priority = "x", 5
    core.add_request(first)
    core.add_request(gives_way)
    seen = Collected()
    while not len(core.scheduler.swapped):
        seen.add(core.step().outputs)
    passes = make_request("c", range(40, 42), max_tokens=12)
    passes.adapter = "y"
    core.add_request(passes)
    while core.has_unfinished():
        seen.add(core.step().outputs)
        assert len({group.request.adapter for group in core.scheduler.running} - {None}) <= 1
    assert len(seen.finals) == 3
    entries = [(each.request_id, each.because) for each in core.scheduler.log.entries if each.kind == "blocked"]
    assert ("b", "adapter x needs a slot, all 1 are in use (max_loras)") in entries


def test_what_a_step_would_have_copied_is_swapped_out_from_where_it_is() -> None:
    core = make_core(num_host_blocks=8, preemption_mode="swap", max_num_batched_tokens=64)
    run(core, [make_request("first", range(12), max_tokens=1)])
    request = make_request("second", [*range(10), 40, 41], max_tokens=3)
    core.add_request(request)
    scheduler, plan = core.scheduler, StepPlan(TokenBudget(64))
    group = scheduler.groups["second"]
    admission = scheduler._admission
    admission.allocate(group, admission.find_prefix(group), plan, now=0.0)
    ((copy,),) = plan.prefix_copies.values()
    scheduler._preemption.preempt(group, plan)
    assert not plan.prefix_copies
    assert [move.source for move in plan.swap_outs][-1] == copy.source
    assert isinstance(core.executor, HashExecutor)
    core.executor.execute(plan.output(0, []))
    scheduler.block_manager.end_planning()
    assert run(core).token_ids == run_alone(request).token_ids


def test_only_what_had_been_computed_counts_as_computed_again() -> None:
    core = make_core(policy="priority", max_num_seqs=1, max_num_batched_tokens=8, enable_prefix_caching=False)
    low, high = make_request("low", range(24), max_tokens=2), make_request("high", range(30, 33), max_tokens=2)
    low.priority = 5
    core.add_request(low)
    core.step()
    core.step()
    core.add_request(high)
    run(core)
    assert core.stats().num_preemptions == 1
    assert core.stats().num_recomputed_tokens == 16


def test_a_copy_of_a_copy_is_swapped_out_from_where_its_content_is() -> None:
    core = make_core(num_host_blocks=16, preemption_mode="swap", max_num_batched_tokens=64)
    run(core, [make_request("first", range(12), max_tokens=1)])
    request = make_request("several", range(10), n=3, max_tokens=6)
    core.add_request(request)
    seen = Collected()
    seen.add(core.step().outputs + core.step().outputs)
    scheduler, plan = core.scheduler, StepPlan(TokenBudget(64))
    group = scheduler.running[0]
    scheduler._preemption.preempt(group)
    # it finds its prompt with the beginning of a block; its sequences share that block, and copy it to write
    admission = scheduler._admission
    admission.allocate(group, admission.find_prefix(group), plan, now=0.0)
    scheduler._rows.plan_group(group, plan)
    copies = [copy for each in plan.copies.values() for copy in each]
    written = {copy.target for copy in copies}
    assert {copy.source for copy in copies} & written
    scheduler._preemption.preempt(group, plan)
    assert not {move.source for move in plan.swap_outs} & written
    assert isinstance(core.executor, HashExecutor)
    core.executor.execute(plan.output(*scheduler._registry.begin_step(plan.rows, 0, 0)))
    scheduler.block_manager.end_planning()
    assert run(core, collected=seen).token_ids["several"] == run_alone(request).token_ids["several"]


@pytest.mark.parametrize("enable_chunked_prefill", [True, False])
def test_no_step_swaps_out_and_in(enable_chunked_prefill: bool) -> None:
    core = pressed(
        num_blocks=12, policy="fair-share", preemption_mode="swap", enable_chunked_prefill=enable_chunked_prefill
    )
    policy = core.scheduler.policy
    assert isinstance(policy, FairShare)
    for name, num_tokens, max_tokens in (("grows", 8, 24), ("small", 4, 12), ("large", 24, 12)):
        request = make_request(name, range(num_tokens), max_tokens=max_tokens)
        request.tenant = name
        core.add_request(request)
    policy.counters["small"] = 1e3
    while not len(core.scheduler.swapped):
        core.step()
    policy.counters["large"] = 1e6
    while len(core.scheduler.swapped) == 1:
        core.step()
    # the small one comes first and would fit
    assert [group.request_id for group in core.scheduler.running] == ["grows"]
    core.step()
    assert [group.request_id for group in core.scheduler.running] == ["grows", "small"]
    run(core)


def test_a_step_that_preempted_lets_nobody_in() -> None:
    core = pressed(num_blocks=8, max_bypasses=5, max_num_seqs=8)
    core.add_request(make_request("grows", range(8), max_tokens=20))
    core.add_request(make_request("large", range(20, 43), max_tokens=2, n=1))
    core.step()
    assert core.stats().num_used_blocks == 8
    core.add_request(make_request("small", [40]))
    core.step()
    assert core.stats().num_preemptions == 1
    assert [group.request_id for group in core.scheduler.running] == ["grows"]
    core.step()
    assert [group.request_id for group in core.scheduler.running] == ["grows", "small"]
    run(core)


def test_a_swapped_group_waits_for_a_sequence() -> None:
    core = pressed(num_blocks=7, policy="priority", preemption_mode="swap", max_num_seqs=2)
    for name, max_tokens, priority in (("a", 13, 1), ("b", 9, 5)):
        request = make_request(name, range(ord(name), ord(name) + 12), max_tokens=max_tokens)
        request.prompt_token_ids, request.priority = [token % 50 for token in request.prompt_token_ids], priority
        core.add_request(request)
    while not len(core.scheduler.swapped):
        core.step()
    for name in "cdef":
        core.add_request(make_request(name, [ord(name) % 50], max_tokens=8))
    while core.has_unfinished():
        core.step()
        assert sum(group.max_running_sequences for group in core.scheduler.running) <= 2


def test_a_swapped_group_that_needs_what_the_watermark_keeps_comes_back_when_nothing_runs() -> None:
    core = make_core(
        num_blocks=7, watermark=0.5, num_host_blocks=40, preemption_mode="swap", enable_prefix_caching=False
    )
    requests = [make_request("a", [1], max_tokens=20), make_request("b", range(20, 28), max_tokens=12)]
    seen = run(core, requests)
    moves = [(each.kind, each.because) for each in core.scheduler.log.entries if each.request_id == "b"]
    # five of seven blocks, of which three stay free while somebody runs
    assert any(kind == "blocked" and because.startswith("needs 5 free KV blocks") for kind, because in moves)
    assert ("swapped_in", "4 blocks") in moves
    for request in requests:
        assert seen.token_ids[request.request_id] == run_alone(request).token_ids[request.request_id]


def test_auto_counts_a_common_prompt_once_and_leaves_out_what_others_keep() -> None:
    core = make_core(num_blocks=64, preemption_mode="auto", num_host_blocks=64, max_num_batched_tokens=64)
    core.add_request(make_request("other", range(9), max_tokens=30))
    core.step()
    core.add_request(make_request("forks", range(8), n=2, max_tokens=30))
    for _ in range(4):
        core.step()
    group = core.scheduler.groups["forks"]
    assert [sequence.num_computed_tokens for sequence in group.live] == [11, 11]
    because = core.scheduler._preemption._cheaper(group, core.scheduler.block_manager).because
    # 8 tokens of prompt and twice 3 behind it; the first block of the prompt is the other's too
    rate = core.scheduler.rates.prefill_tokens_per_s
    assert because.startswith(f"14 tokens, 1 blocks of them shared, take {10 / rate * 1e3:.3g} ms to compute again")


def test_a_preempted_group_that_leaves_is_not_among_those_that_never_ran() -> None:
    core = pressed()
    for request in (make_request("a", range(12), max_tokens=16), make_request("b", range(20, 30), max_tokens=10)):
        core.add_request(request)
    while not core.stats().num_preemptions:
        core.step()
    assert core.scheduler._registry.num_queued_tokens == 0
    core.abort_requests(["b"])
    assert core.scheduler._registry.num_queued_tokens == 0


def test_the_timeline_tells_what_happened() -> None:
    core = pressed(preemption_mode="swap")
    seen = run_two(core)
    metrics = seen.finals["b"].metrics
    assert metrics is not None
    events = [event for _, event in metrics.timeline]
    assert events[:2] == ["queued", "scheduled"]
    assert "preempted, swapped out" in events
    assert "swapped in" in events
    assert events[-1] == "finished"
    times = [time for time, _ in metrics.timeline]
    assert times == sorted(times)


def test_the_front_is_told_of_a_preemption_before_the_request_ends() -> None:
    core = pressed(preemption_mode="swap")
    told: list[list[str]] = []
    core.add_request(make_request("a", range(12), max_tokens=16))
    core.add_request(make_request("b", range(20, 30), max_tokens=20))
    while core.has_unfinished():
        for output in core.step().outputs:
            if output.request_id == "b" and output.metrics is not None and not output.finished:
                told.append([event for _, event in output.metrics.timeline])
    assert told[0] == ["queued", "scheduled", "first token"]
    assert "swapped in" in told[1]


def test_log_probabilities_of_a_prompt_that_was_swapped_out_on_its_way_are_not_lost() -> None:
    core = make_core(
        max_num_batched_tokens=8,
        max_num_seqs=1,
        depth=3,
        policy="priority",
        preemption_mode="swap",
        num_host_blocks=40,
        enable_prefix_caching=False,
    )
    low = make_request("low", range(30), max_tokens=3, prompt_logprobs=0)
    low.priority = 5
    core.add_request(low)
    seen = Collected()
    seen.add(core.step().outputs)
    core.add_request(make_request("high", range(5), max_tokens=3))
    run(core, collected=seen)
    assert core.stats().num_preemptions_by_swap == 1
    assert seen.prompt_logprobs["low"] == run_alone(low).prompt_logprobs["low"]


def test_after_a_sleep_no_sequence_is_forked_from_one_that_ended_before_it() -> None:
    """A sequence that had ended, and that the workers were not yet told to release, counted as one that they held."""
    request = make_request("a", range(12), n=3, max_tokens=16)
    core, collected = make_core(), Collected()
    core.add_request(request)
    for _ in range(3):
        collected.add(core.step().outputs)
    core.stop_sequence("a", 0)
    core.call("sleep")
    core.call("wake_up")
    run(core, collected=collected)
    alone = run_alone(request)
    assert [collected.token_ids["a"][index] for index in (1, 2)] == [alone.token_ids["a"][index] for index in (1, 2)]
