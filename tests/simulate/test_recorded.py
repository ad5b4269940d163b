"""A recording as a trace, a cost model and arguments: with all three the simulation is what was recorded."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from octavo.config.args import EngineArgs
from octavo.core.messages import CoreReady
from octavo.core.process import frames
from octavo.engine.engine_core import EngineCore
from octavo.engine.recorder import Began, RecordedScheduler, Recorder
from octavo.errors import ConfigError
from octavo.scheduler.build import SchedulerSettings, build_scheduler
from octavo.simulate.cost_model import Fitted
from octavo.simulate.executor import Clock, SimulatedExecutor
from octavo.simulate.recorded import Recorded, read_recorded, recorded_arguments, recorded_costs
from octavo.simulate.settings import engine_settings
from octavo.simulate.simulation import Simulation, simulate
from octavo.simulate.traces import Trace, TraceRequest, Workload, generate
from tests.simulate.parts import make_costs, make_settings
from tests.simulate.test_replay import record_busy_run

COSTS = msgspec.structs.replace(
    make_costs(step_s=1e-2, sequence_s=2e-3, prefill_token_s=5e-3, kv_bytes_per_token=2.0),
    context_token_s=1e-4,
    pair_s=1e-5,
    prefill_step_s=4e-3,
    swap_bytes_per_s=100.0,
    num_kv_tokens=24 * 4,
)


def recorded_core(
    path: Path, settings: SchedulerSettings, costs: Fitted
) -> tuple[EngineCore, SimulatedExecutor, Clock]:
    """A core in simulated time, recorded to `path` as a server would."""
    clock = Clock()
    executor = SimulatedExecutor(costs, settings.cache.block_size, clock)
    ready = CoreReady(cache=settings.limits, max_model_len=256, vocab_size=0, plan="")
    depth = settings.scheduler.max_steps_in_flight
    recorder = Recorder(str(path), settings, depth)
    core = EngineCore(
        executor,
        RecordedScheduler.around(build_scheduler(settings), recorder),
        ready,
        max_steps_in_flight=depth,
        clock=clock,
        on_shutdown=recorder.close,
    )
    return core, executor, clock


def record(path: Path, settings: SchedulerSettings, trace: Trace, costs: Fitted) -> None:
    core, executor, clock = recorded_core(path, settings, costs)
    waiting = sorted(range(len(trace)), key=lambda number: trace.requests[number].arrival_s)
    while waiting or core.has_unfinished():
        if not core.has_unfinished():
            clock.now = max(clock.now, trace.requests[waiting[0]].arrival_s)
        while waiting and trace.requests[waiting[0]].arrival_s <= clock.now:
            number = waiting.pop(0)
            request, script = trace.request(number, trace.requests[number].arrival_s)
            executor.expect(number, script)
            core.add_request(request)
        core.step()
    core.shutdown()


def test_what_a_reset_of_the_cache_forgot_is_not_found(tmp_path: Path) -> None:
    settings = make_settings(max_num_batched_tokens=64)
    core, executor, clock = recorded_core(tmp_path / "run", settings, COSTS)
    trace = Trace([TraceRequest(request_id=str(i), prompt_token_ids=[7] * 33, output_len=2) for i in range(4)])
    for number in range(4):
        request, script = trace.request(number, clock.now)
        executor.expect(number, script)
        core.add_request(request)
        assert core.reset_prefix_cache(), "it waits: what it finds is what was not reset"
        if number == 2:
            core.step()
            assert not core.reset_prefix_cache()
        while core.has_unfinished():
            core.step()
        if number == 0:
            request, script = trace.request(number, clock.now)
            core.add_request(msgspec.structs.replace(request, request_id="again"))
            while core.has_unfinished():
                core.step()
    core.shutdown()
    recorded = read_recorded(tmp_path / "run")
    outcome = simulate(Trace(recorded.requests), Simulation(settings=recorded.settings, cost_model=COSTS))
    cached = [record.num_cached_tokens for record in recorded.outcome.records]
    assert cached == [0, 32, 0, 0, 0]
    assert [record.num_cached_tokens for record in outcome.records] == cached


def small_trace(**kinds: int) -> Trace:
    workload = Workload(
        num_requests=40, request_rate=20.0, input_len=14, output_len=9, max_len=50, shared_prefix_len=6, **kinds
    )
    first = generate(workload, seed=3)[0].arrival_s
    return Trace(
        [msgspec.structs.replace(each, arrival_s=each.arrival_s - first) for each in generate(workload, seed=3)]
    )


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_under_the_recorded_settings_a_simulation_is_the_recorded_run(tmp_path: Path, n: int, mode: str) -> None:
    settings = make_settings(num_blocks=24, num_host_blocks=16, preemption_mode=mode)  # type: ignore[arg-type]
    record(tmp_path / "run", settings, small_trace(n=n), COSTS)
    recorded = read_recorded(tmp_path / "run")
    outcome = simulate(Trace(recorded.requests), Simulation(settings=recorded.settings, cost_model=COSTS))
    assert outcome.totals.num_preemptions > 0
    assert outcome.totals.num_steps == recorded.outcome.totals.num_steps
    assert outcome.totals.num_swapped_blocks == recorded.outcome.totals.num_swapped_blocks
    for simulated, real in zip(outcome.records, recorded.outcome.records, strict=True):
        assert simulated.num_output_tokens == real.num_output_tokens
        assert simulated.num_cached_tokens == real.num_cached_tokens
        assert (simulated.first_token_s, simulated.finished_s) == pytest.approx((real.first_token_s, real.finished_s))


@pytest.mark.parametrize(
    "kind", [{"n": 1, "best_of": 3}, {"n": 1, "best_of": 3, "beam_search": True}, {"n": 2, "beam_search": True}]
)
def test_sequences_that_are_not_returned_count_in_both(tmp_path: Path, kind: dict[str, int]) -> None:
    settings = make_settings(num_blocks=400, max_num_seqs=16)
    costs = make_costs(step_s=0.1)  # the cost of steps does not hang on which beams survive
    record(tmp_path / "run", settings, small_trace(**kind), costs)
    recorded = read_recorded(tmp_path / "run")
    outcome = simulate(Trace(recorded.requests), Simulation(settings=settings, cost_model=costs))
    for simulated, real in zip(outcome.records, recorded.outcome.records, strict=True):
        assert simulated.num_output_tokens == real.num_output_tokens
        assert real.num_output_tokens >= real.num_sequences
        assert (simulated.first_token_s, simulated.finished_s) == pytest.approx((real.first_token_s, real.finished_s))
    assert any(each.first_token_s != each.finished_s for each in recorded.outcome.records)


@pytest.mark.parametrize("depth", [1, 2])
def test_the_cost_of_steps_is_found_in_the_recording(tmp_path: Path, depth: int) -> None:
    settings = make_settings(num_blocks=24, num_host_blocks=16, preemption_mode="swap", depth=depth, block_bytes=8)
    record(tmp_path / "run", settings, small_trace(), COSTS)
    model = recorded_costs("recorded", read_recorded(tmp_path / "run"))
    assert model.fit_error < 1e-6
    for name in ("step_s", "prefill_step_s", "sequence_s", "prefill_token_s", "context_token_s", "swap_bytes_per_s"):
        assert getattr(model, name) == pytest.approx(getattr(COSTS, name), rel=0.02)
    assert (model.num_kv_tokens, model.kv_bytes_per_token) == (96, 2.0)


def test_a_recording_of_beams_alone_has_a_cost_too(tmp_path: Path) -> None:
    settings = make_settings(num_blocks=400, max_num_seqs=16, block_bytes=8)
    costs = msgspec.structs.replace(COSTS, copy_bytes_per_s=400.0)
    record(tmp_path / "run", settings, small_trace(n=4, beam_search=True), costs)
    recorded = read_recorded(tmp_path / "run")
    assert sum(step.work.num_copied_blocks > 0 for step in recorded.steps) > len(recorded.steps) / 2
    model = recorded_costs("recorded", recorded)
    assert model.fit_error < 1e-6
    assert model.copy_bytes_per_s == pytest.approx(400.0, rel=0.02)


def test_a_recording_with_too_few_steps_for_a_cost_model_says_what_to_do(tmp_path: Path) -> None:
    trace = Trace([TraceRequest(num_prompt_tokens=3, output_len=4)])
    record(tmp_path / "run", make_settings(), trace, COSTS)
    with pytest.raises(ConfigError, match="too few steps .*: 4 without swapped blocks, needed are 7; give cost_model"):
        recorded_costs("recorded", read_recorded(tmp_path / "run"))


def test_arguments_are_those_of_the_recorded_scheduler(tmp_path: Path) -> None:
    args = EngineArgs(
        scheduling_policy="fair-share",
        tenant_weights={"a": "2"},
        max_num_seqs=7,
        preemption_mode="swap",
        max_queued_tokens=500,
        watermark=0.05,
        max_steps_in_flight=2,
        swap_space=1024 / (1 << 30),
        block_size=4,
    )
    settings = engine_settings(args, COSTS, max_model_len=200)
    empty = Recorded(
        settings, [], 0, [], simulate(small_trace(), Simulation(settings=settings, cost_model=COSTS)), None
    )
    again = EngineArgs(**recorded_arguments(empty))
    assert engine_settings(again, COSTS, max_model_len=again.max_model_len or 0) == settings


def test_what_real_outputs_were_is_found_by_later_prompts(tmp_path: Path) -> None:
    answer = [7, 8, 9, 7, 8, 9, 1]
    first = TraceRequest(prompt_token_ids=[1, 2, 3, 4, 5], output_len=7, output_token_ids=[answer])
    second = TraceRequest(prompt_token_ids=[1, 2, 3, 4, 5, *answer, 6], output_len=1, arrival_s=99.0)
    outcome = simulate(Trace([first, second]), Simulation(settings=make_settings(), cost_model=COSTS))
    # eleven tokens were computed: two full blocks of four
    assert outcome.records[1].num_cached_tokens == 8


def test_requests_that_are_aborted_or_stopped_end_where_they_were(tmp_path: Path) -> None:
    record_busy_run(tmp_path / "run", depth=1)
    recorded = read_recorded(tmp_path / "run")
    assert len(recorded.requests) + recorded.num_left_out == 25
    settings = make_settings()
    outcome = simulate(Trace(recorded.requests), Simulation(settings=settings, cost_model=COSTS))
    assert [record.error for record in outcome.records] == [None] * len(recorded.requests)
    single = [
        (simulated, real)
        for simulated, real in zip(outcome.records, recorded.outcome.records, strict=True)
        if real.num_sequences == 1
    ]
    assert all(simulated.num_output_tokens == real.num_output_tokens for simulated, real in single)


@pytest.mark.parametrize("how", ["abort", "stop"])
def test_a_wait_behind_a_request_that_was_given_up_is_no_step(tmp_path: Path, how: str) -> None:
    core, executor, clock = recorded_core(tmp_path / "run", make_settings(), make_costs(step_s=0.1))
    trace = Trace([TraceRequest(num_prompt_tokens=5, output_len=9) for _ in range(3)])
    for number in range(3):
        request, script = trace.request(number, clock.now)
        executor.expect(number, script)
        core.add_request(request)
        core.step()
        core.step()
        if how == "abort":
            core.abort_requests([request.request_id])
        else:
            core.stop_sequence(request.request_id, 0)
        while core.has_unfinished():
            core.step()
        clock.now += 60.0
    core.shutdown()
    assert [step.seconds for step in read_recorded(tmp_path / "run").steps] == pytest.approx([0.1] * 6)


def test_a_recording_in_which_nothing_came_out_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run").write_bytes(frames.pack(Began(make_settings(), 1)))
    with pytest.raises(ConfigError, match="has no request that produced a token"):
        read_recorded(tmp_path / "run")


def test_what_keeps_prompts_apart_in_the_cache_does_so_in_the_simulation(tmp_path: Path) -> None:
    prompt, image = list(range(1, 18)), (2, 6, "a cat")
    keys = [{}, {}, {"cache_salt": "b"}, {"adapter": "c"}, {"placeholders": [image]}, {"placeholders": [image]}]
    keys += [{"cache_namespace": "b"}, {"cache_namespace": "b", "cache_salt": "b"}, {"cache_namespace": "b"}]
    trace = Trace(
        [
            TraceRequest(arrival_s=number, prompt_token_ids=prompt, output_len=1, **key)  # type: ignore[arg-type]
            for number, key in enumerate(keys)
        ]
    )
    record(tmp_path / "run", make_settings(max_num_batched_tokens=32), trace, make_costs(step_s=0.1))
    recorded = read_recorded(tmp_path / "run")
    outcome = simulate(Trace(recorded.requests), Simulation(settings=recorded.settings, cost_model=COSTS))
    found = [each.num_cached_tokens for each in recorded.outcome.records]
    assert found == [0, 16, 0, 0, 2, 16, 0, 0, 16]
    assert [each.num_cached_tokens for each in outcome.records] == found
