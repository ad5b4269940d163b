"""With a stage per step in flight, sequences that decode are spread over the steps, so that each stage has one."""

from __future__ import annotations

import random
from concurrent.futures import Future
from typing import Any

import pytest

from octavo.core.step import ModelRunnerOutput, SchedulerOutput
from octavo.engine.engine_core import EngineCore
from octavo.scheduler import continuous
from tests.fakes.engine import Collected, make_core, make_request, run, run_alone


class Stages:
    """Passes steps on, and notes how many stages have a step whenever the oldest step leaves the last one."""

    sends_tokens = True

    def __init__(self, executor: Any) -> None:
        self._executor = executor
        self._num_in_flight = 0
        self.busy: list[int] = []
        self.decode_rows: list[int] = []

    def submit(self, step: SchedulerOutput) -> Future[ModelRunnerOutput]:
        self._num_in_flight += 1
        self.decode_rows.append(sum(row.num_tokens == 1 for row in step.rows))
        output, leave = self._executor.execute(step), self._leave

        class Waited(Future[ModelRunnerOutput]):
            def result(self, timeout: float | None = None) -> ModelRunnerOutput:
                leave()
                return output

        return Waited()

    def _leave(self) -> None:
        self.busy.append(self._num_in_flight)
        self._num_in_flight -= 1

    def shutdown(self) -> None:
        self._executor.shutdown()


def staged(num_stages: int, **settings: Any) -> tuple[EngineCore, Stages]:
    core = make_core(depth=num_stages, sends_tokens=True, **settings)
    core.executor = stages = Stages(core.executor)  # type: ignore[assignment]
    return core, stages


@pytest.mark.parametrize("is_chunked", [True, False])
@pytest.mark.parametrize("num_stages", [2, 3])
def test_with_enough_sequences_every_stage_always_has_a_step(num_stages: int, is_chunked: bool) -> None:
    core, stages = staged(num_stages, max_num_batched_tokens=64, enable_chunked_prefill=is_chunked)
    requests = [make_request(f"r{i}", range(i, i + 5), max_tokens=20, seed=i) for i in range(6)]
    seen = run(core, requests)
    for request in requests:
        assert seen.token_ids[request.request_id] == run_alone(request).token_ids[request.request_id]
    # but for the step of the prompts, and the last tokens
    idle = [place for place, busy in enumerate(stages.busy) if busy < num_stages]
    assert set(idle) <= {0, *range(len(stages.busy) - num_stages, len(stages.busy))}
    assert set(stages.decode_rows[1:-num_stages]) == {6 // num_stages}


def test_one_stage_has_all_sequences_in_each_step() -> None:
    core = make_core(max_num_batched_tokens=64)
    executor = Stages(core.executor)
    core.executor = executor  # type: ignore[assignment]
    run(core, [make_request(f"r{i}", range(i, i + 5), max_tokens=20) for i in range(7)])
    assert executor.decode_rows[1:] == [7] * 19


def test_the_parts_of_a_prompt_follow_each_other_without_waiting() -> None:
    core, stages = staged(3, max_num_batched_tokens=8)
    run(core, [make_request("a", range(30), max_tokens=1)])
    assert stages.busy == [3, 3, 2, 1]  # 30 tokens are four steps


@pytest.mark.parametrize(
    ("num_stages", "chunks"), [(1, [1200]), (2, [600, 600]), (3, [400] * 3), (8, [256] * 4 + [176])]
)
def test_prompts_are_cut_into_a_chunk_for_each_stage(num_stages: int, chunks: list[int]) -> None:
    core, _ = staged(num_stages, max_num_batched_tokens=2048, max_model_len=2048, num_blocks=100, block_size=16)
    core.add_request(make_request("a", range(1200), max_tokens=1))
    planned = []
    while (step := core.scheduler.schedule(0.0)) is not None:
        planned.append(step.num_tokens)
    assert planned == chunks


def test_sequences_that_join_and_end_are_spread_anew() -> None:
    """Steps are as large as each other again one turn after any change."""
    core, stages = staged(2, max_num_seqs=16, max_num_batched_tokens=64)
    seen = Collected()
    for i in range(5):
        core.add_request(make_request(f"r{i}", range(i, i + 5), max_tokens=40, seed=i))
    for _ in range(10):
        seen.add(core.step().outputs)
    core.add_request(make_request("many", range(6), n=6, max_tokens=10))
    for _ in range(10):
        seen.add(core.step().outputs)
    assert {*stages.decode_rows[-4:]} == {5, 6}
    core.abort_requests(["r0", "r1", "r2", "r3"])
    for _ in range(4):
        core.step()
    assert {*stages.decode_rows[-2:]} <= {3, 4}
    run(core, collected=seen)


def test_beams_of_a_search_may_be_in_several_stages() -> None:
    request = make_request("a", range(6), n=4, max_tokens=12, use_beam_search=True)
    core, stages = staged(2)
    assert run(core, [request]).token_ids == run_alone(request).token_ids
    assert stages.busy.count(2) > 8


@pytest.mark.parametrize("seed", range(8))
def test_small_chunks_in_a_small_pool_change_no_token(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(continuous, "_SMALLEST_PIECE", 2)
    source = random.Random(seed)
    core, _ = staged(source.choice([2, 3, 4]), num_blocks=12, policy=source.choice(["fcfs", "fair-share"]))
    requests = [
        make_request(
            f"r{i}", [source.randrange(3) for _ in range(source.randrange(1, 20))], seed=i, n=source.choice([1, 2])
        )
        for i in range(9)
    ]
    seen = run(core, requests)
    for request in requests:
        assert seen.token_ids[request.request_id] == run_alone(request).token_ids[request.request_id]
    assert core.stats().num_preemptions > 0


def test_those_that_run_on_have_a_step_when_the_one_whose_turn_it_was_is_preempted() -> None:
    core = make_core(num_blocks=3, block_size=4, depth=2, policy="priority", sends_tokens=True)
    requests = [make_request("last", range(4), max_tokens=3), make_request("first", range(5), max_tokens=3)]
    requests[0].priority = 1
    seen = run(core, requests)
    assert core.stats().num_preemptions == 1
    for request in requests:
        assert seen.token_ids[request.request_id] == run_alone(request).token_ids[request.request_id]


@pytest.mark.parametrize("sends_tokens", [False, True])
@pytest.mark.parametrize("width", [{}, {"n": 2}, {"n": 2, "use_beam_search": True}])
def test_rows_that_wait_for_a_grammar_draw_once_behind_chunks(width: dict[str, object], sends_tokens: bool) -> None:
    forms: dict[str, object] = {"structured_outputs": {"json_object": True}, **width}
    requests = [make_request(name, [seed] * 9, seed=seed, **forms) for seed, name in enumerate("ab", start=1)]
    core = make_core(depth=2, compile_steps=1, max_num_batched_tokens=6, sends_tokens=sends_tokens)
    together = run(core, requests)
    for request in requests:
        assert together.token_ids[request.request_id] == run_alone(request).token_ids[request.request_id]
