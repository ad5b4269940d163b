"""Recurrent layers beside layers that keep all tokens: rows start from the state of exactly the tokens before them."""

from __future__ import annotations

import pytest

from octavo.config.schema import PreemptionMode
from octavo.engine.engine_core import EngineCore
from tests.fakes.engine import Collected, make_core, make_request, run, run_alone
from tests.fakes.executor import STATE, HashExecutor
from tests.fakes.proposer import ToyProposer

BOTH = (None, STATE)
BLOCK = 4


def state_core(num_states: int = 12, **options: object) -> EngineCore:
    values: dict[str, object] = {"max_num_batched_tokens": 8, "num_blocks": (64, num_states)} | options
    return make_core(block_size=BLOCK, sliding_window=BOTH, **values)  # type: ignore[arg-type]


def used_states(core: EngineCore) -> int:
    return core.scheduler.block_manager.groups[1].pool.num_used_blocks


@pytest.mark.parametrize("depth", [1, 3])
def test_a_request_holds_two_states_at_most_between_steps(depth: int) -> None:
    core = state_core(depth=depth)
    core.add_request(make_request("a", range(40), max_tokens=30))
    most = 0
    while core.has_unfinished():
        core.step()
        most = max(most, used_states(core))
    assert most <= 2
    assert core.stats().num_preemptions == 0


def test_the_next_turn_goes_on_behind_the_last_block_of_the_prompt() -> None:
    core = state_core(max_num_batched_tokens=64, state_snapshot_tokens=0)
    seen = run(core, [make_request("a", range(30), max_tokens=5)])
    turn = [*range(30), *seen.token_ids["a"][0], 7, 8, 9]
    seen = run(core, [again := make_request("b", turn, max_tokens=4)])
    assert seen.finals["b"].num_cached_tokens == 28
    assert seen.finals["b"].cache_miss_reason == "recurrent layers have no snapshot between tokens 28 and 32"
    assert seen.token_ids == run_alone(again, BOTH).token_ids


@pytest.mark.parametrize("mode", ["recompute", "swap"])
@pytest.mark.parametrize("depth", [1, 3])
def test_preempted_requests_go_on_from_a_state_of_theirs(mode: PreemptionMode, depth: int) -> None:
    core = state_core(num_states=7, preemption_mode=mode, num_host_blocks=64, depth=depth)
    kinds: list[dict[str, object]] = [{}, {"n": 2}, {"n": 2, "use_beam_search": True}, {}]
    requests = [make_request(f"r{i}", range(i, 6 * i + 9), max_tokens=20, seed=i, **kinds[i % 4]) for i in range(8)]
    seen = run(core, requests)
    stats = core.stats()
    assert stats.num_preemptions > 0
    assert stats.num_preemptions_by_swap == 0 or mode == "swap"
    assert stats.num_preemptions_by_swap > 0 or mode != "swap"
    for request in requests:
        name = request.request_id
        assert seen.token_ids[name] == run_alone(request, BOTH).token_ids[name]


def test_recomputation_starts_from_the_last_snapshot() -> None:
    core = state_core(num_states=16, max_num_batched_tokens=64, state_snapshot_tokens=8)
    core.add_request(request := make_request("a", range(21), max_tokens=20))
    for _ in range(13):
        core.step()
    group = core.scheduler.groups["a"]
    computed = group.live[0].num_computed_tokens
    core.scheduler._preemption.preempt(group, because="of the test")
    seen = run(core)
    assert core.stats().num_recomputed_tokens == computed - 32
    assert seen.finish["a"][0][0] == "length"
    assert run_alone(request, BOTH).token_ids["a"][0][-len(seen.token_ids["a"][0]) :] == seen.token_ids["a"][0]


def test_a_token_whose_form_was_not_ready_is_drawn_behind_a_snapshot() -> None:
    request = make_request("a", range(13), max_tokens=6, structured_outputs={"json_object": True})
    core = state_core(compile_steps=3)
    seen = run(core, [request])
    assert core.stats().num_preemptions > 0
    assert seen.token_ids == run_alone(request, BOTH).token_ids


@pytest.mark.parametrize("rightness", [0.0, 0.5, 1.0])
def test_no_state_is_kept_behind_a_draft(rightness: float) -> None:
    request = make_request("a", range(20), max_tokens=41)
    alone = run_alone(request, BOTH)
    proposer = ToyProposer(lambda group: alone.token_ids["a"], rightness)
    core = state_core(proposer=proposer, max_num_batched_tokens=32)
    core.add_request(request)
    seen, most = Collected(), 0
    while core.has_unfinished():
        seen.add(core.step().outputs)
        most = max(most, used_states(core))
    assert seen.token_ids == alone.token_ids
    assert most <= 2
    assert isinstance(core.executor, HashExecutor)
    rows = [row for step in core.executor.steps for row in step.rows if row.start >= 20]
    # right drafts are computed once more, and wrong ones never again
    expected = {0.0: [1] * 40, 1.0: [1, *[5] * 7]}
    if rightness in expected:
        assert [row.num_tokens - len(row.drafts) for row in rows] == expected[rightness]


def test_a_model_of_states_alone_finds_the_cheaper_preemption() -> None:
    core = make_core(
        block_size=BLOCK, sliding_window=(STATE,), num_blocks=7, num_host_blocks=64, preemption_mode="auto",
        max_num_batched_tokens=8,
    )  # fmt: skip
    requests = [make_request(f"r{i}", range(i, 6 * i + 9), max_tokens=20, seed=i, n=1 + i % 2) for i in range(8)]
    seen = run(core, requests)
    assert core.stats().num_preemptions > 0
    for request in requests:
        assert seen.token_ids[request.request_id] == run_alone(request, (STATE,)).token_ids[request.request_id]
