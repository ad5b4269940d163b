"""The short path of ordinary decode rows plans what the long one plans."""

from __future__ import annotations

import random

import pytest

from octavo.core.step import SchedulerOutput
from octavo.kv_cache.block_table import BlockTable
from octavo.scheduler.budget import TokenBudget
from octavo.scheduler.plan import StepPlan, new_sequence
from octavo.scheduler.rows import RowPlanner
from tests.fakes.engine import Collected, make_core, make_request, run, run_alone
from tests.fakes.executor import HashExecutor
from tests.fakes.proposer import ToyProposer

KINDS: list[dict[str, object]] = [{}, {"n": 3}, {"n": 2, "use_beam_search": True}, {"prompt_logprobs": 0}]


def steps_of_a_busy_run(seed: int) -> list[SchedulerOutput]:
    """Forks, beams, stops and preemptions in a small pool."""
    source = random.Random(seed)
    core = make_core(
        num_blocks=source.choice([12, 24, 60]),
        block_size=source.choice([1, 2, 4]),
        depth=source.choice([1, 2, 3]),
        num_host_blocks=source.choice([0, 20]),
        preemption_mode=source.choice(["recompute", "swap"]),
        enable_prefix_caching=source.random() < 0.7,
        num_lookahead_slots=source.choice([0, 0, 2]),
        policy=source.choice(["fcfs", "fair-share"]),
        enable_chunked_prefill=source.random() < 0.7,
        sends_tokens=source.random() < 0.4,
    )
    for number in range(16):
        prompt = [source.randrange(3) for _ in range(source.randrange(1, 12))]
        core.add_request(
            make_request(f"r{number}", prompt, max_tokens=source.randrange(1, 12), seed=number, **KINDS[number % 4])
        )
        for _ in range(source.randrange(3)):
            core.step()
    run(core)
    assert isinstance(core.executor, HashExecutor)
    return core.executor.steps


@pytest.mark.parametrize("seed", range(20))
def test_the_short_path_plans_the_same_steps(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = steps_of_a_busy_run(seed)
    monkeypatch.setattr(RowPlanner, "_plan_next_token", lambda *_: False)
    assert steps_of_a_busy_run(seed) == steps


@pytest.mark.parametrize(("n", "depth"), [(1, 1), (1, 3), (3, 1)])
def test_decode_rows_take_the_short_path(n: int, depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[bool] = []
    short_path = RowPlanner._plan_next_token

    def counted(*arguments: object) -> bool:
        taken.append(short_path(*arguments))  # type: ignore[arg-type]
        return taken[-1]

    monkeypatch.setattr(RowPlanner, "_plan_next_token", counted)
    run(make_core(block_size=16, depth=depth), [make_request("a", range(4), n=n, max_tokens=8)])
    # of each sequence's seven decode rows the first may come before it is known or copy a shared block
    assert taken.count(True) >= 6 * n


@pytest.mark.parametrize("n", [1, 3])
def test_a_group_that_waits_for_results_has_one_row_of_a_sequence_in_flight(n: int) -> None:
    request = make_request("a", range(4), n=n, max_tokens=6)
    core, seen = make_core(), Collected()
    core.add_request(request)
    core.scheduler.groups["a"].waits_for_results = True
    while (step := core.scheduler.schedule(0.0)) is not None:
        assert core.scheduler.schedule(0.0) is None
        seen.add(core.scheduler.update(core.executor.submit(step).result(), 0.0))
    assert seen.token_ids == run_alone(request).token_ids


def test_the_adapter_of_a_group_and_the_payload_of_a_plan_travel_with_the_step() -> None:
    core = make_core()
    core.add_request(make_request("a", range(4)))
    group = core.scheduler.groups["a"]
    group.adapter = 3
    table = BlockTable()
    table.blocks = [[1]]
    message = new_sequence(group, group.live[0], table, 16)
    assert message.adapter == 3
    plan = StepPlan(TokenBudget(1))
    assert plan.output(1, []).connector is None
    plan.connector = b"blocks"
    assert plan.output(1, []).connector == b"blocks"


@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("rightness", [None, 0.5])
@pytest.mark.parametrize("preemption_mode", ["recompute", "swap"])
def test_a_worker_that_draws_nothing_has_the_tokens(preemption_mode: str, rightness: float | None, depth: int) -> None:
    requests = [
        make_request(f"r{number}", [number, *range(7)], max_tokens=10, seed=number, **KINDS[number % 4])
        for number in range(8)
    ]
    alone = {each.request_id: run_alone(each).token_ids[each.request_id] for each in requests}
    proposer = None if rightness is None else ToyProposer(lambda group: alone[group.request_id], rightness)
    core = make_core(
        num_blocks=14, depth=depth, preemption_mode=preemption_mode, num_host_blocks=20, proposer=proposer,
        sends_tokens=True,
    )  # fmt: skip
    # the fake executor compares the tokens and the blocks of both workers at each row
    assert run(core, requests).token_ids == alone
    assert core.stats().num_preemptions > 0
