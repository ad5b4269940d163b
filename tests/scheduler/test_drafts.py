"""Drafts change how many tokens a step gives, and nothing else."""

from __future__ import annotations

import pytest

from octavo.core.messages import EngineCoreRequest
from octavo.engine.engine_core import EngineCore
from tests.fakes.engine import make_core, make_request, run, run_alone
from tests.fakes.executor import HashExecutor
from tests.fakes.proposer import ToyProposer


def drafting(request: EngineCoreRequest, rightness: float, most: int = 4, **options: object) -> EngineCore:
    tokens = run_alone(request).token_ids[request.request_id]
    return make_core(proposer=ToyProposer(lambda _: tokens, rightness, most), **options)  # type: ignore[arg-type]


def num_steps(core: EngineCore) -> int:
    assert isinstance(core.executor, HashExecutor)
    return len(core.executor.steps)


@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("rightness", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("params", [{}, {"n": 3}, {"stop_token_ids": (5, 6, 7)}, {"n": 2, "use_beam_search": True}])
def test_results_are_those_without_drafts(params: dict[str, object], rightness: float, depth: int) -> None:
    request = make_request("a", [1, 2, 3, 4, 5], max_tokens=30, **params)
    alone = run_alone(request)
    core = drafting(request, rightness, depth=depth)
    seen = run(core, [request])
    assert (seen.token_ids, seen.logprobs, seen.finish) == (alone.token_ids, alone.logprobs, alone.finish)
    if "use_beam_search" not in params:
        assert core.stats().num_generated_tokens == sum(map(len, alone.token_ids["a"].values()))


def test_right_drafts_save_steps_and_wrong_ones_cost_none() -> None:
    request = make_request("a", range(5), max_tokens=21)
    for rightness, expected in ((0.0, 21), (1.0, 1 + 4)):  # the prompt gives one token, then five a step
        core = drafting(request, rightness, most=4)
        run(core, [request])
        assert num_steps(core) == expected


def test_blocks_of_wrong_drafts_are_not_found_as_a_prefix() -> None:
    request = make_request("a", range(4), max_tokens=9)
    tokens = run_alone(request).token_ids["a"][0]
    core = drafting(request, 0.0)
    run(core, [request])
    again = make_request("b", [*range(4), *tokens], max_tokens=4)
    assert run(core, [again]).token_ids["b"] == run_alone(again).token_ids["b"]
    wrong = make_request("c", [*range(4), *tokens[:4], (tokens[4] + 1) % 50, 3, 3, 3], max_tokens=4)
    assert run(core, [wrong]).token_ids["c"] == run_alone(wrong).token_ids["c"]


def test_drafts_leave_a_token_of_the_step_to_each_running_sequence() -> None:
    requests = [make_request(f"r{i}", [i], max_tokens=12, seed=i) for i in range(6)]
    tokens = {each.request_id: run_alone(each).token_ids[each.request_id] for each in requests}
    proposer = ToyProposer(lambda group: tokens[group.request_id], 1.0)
    core = make_core(proposer=proposer, max_num_batched_tokens=8)
    seen = run(core, requests)
    assert seen.token_ids == tokens
    assert isinstance(core.executor, HashExecutor)
    rows = [(number, row) for number, step in enumerate(core.executor.steps) for row in step.rows]
    assert any(row.drafts for _, row in rows)
    for seq_id in {row.seq_id for _, row in rows}:
        numbers = [number for number, row in rows if row.seq_id == seq_id]
        assert numbers == list(range(numbers[0], numbers[-1] + 1)), "a running sequence was left out of a step"


def test_drafts_of_a_request_that_ended_meanwhile_count_for_nothing() -> None:
    core = drafting(make_request("a", range(5), max_tokens=21), 1.0)
    core.add_request(make_request("a", range(5), max_tokens=21))
    core.step()
    step = core.scheduler.schedule(1.0)
    assert step is not None
    assert step.rows[0].drafts
    output = core.executor.submit(step).result()
    core.abort_requests(["a"])
    assert core.scheduler.update(output, 2.0) == []
    assert core.stats().num_drafts == core.stats().num_accepted_tokens == 0


def test_drafts_take_no_block_from_another_group() -> None:
    requests = [make_request(f"r{i}", [i] * 8, max_tokens=8, seed=i) for i in range(2)]
    tokens = {each.request_id: run_alone(each).token_ids[each.request_id] for each in requests}
    core = make_core(num_blocks=8, proposer=ToyProposer(lambda group: tokens[group.request_id], 0.0))
    assert run(core, requests).token_ids == tokens
    assert core.stats().num_preemptions == 0
