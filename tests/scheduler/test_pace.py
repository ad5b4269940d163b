"""A prompt that is computed while others decode is cut so that steps stay short."""

from __future__ import annotations

from statistics import median
from typing import NamedTuple

import msgspec
import pytest

from octavo.engine.engine_core import EngineCore
from octavo.scheduler.build import build_scheduler
from octavo.scheduler.rates import Pace, Rates, _Planned
from octavo.simulate.cost_model import Fitted, Roofline, StepWork
from octavo.simulate.executor import END_TOKEN, Clock, Script, SimulatedExecutor
from tests.fakes.engine import make_core, make_request, make_settings, run
from tests.fakes.executor import HashExecutor

DECODE_S, PROMPT_TOKEN_S = 0.030, 0.003

READS_OR_COMPUTES = Roofline(
    name="two cores", weight_bytes=1.2e9, kv_bytes_per_token=1e5, flops_per_token=1.2e9, flops_per_pair=2e5,
    device_bytes=64e9, bytes_per_s=40e9, flops_per_s=0.42e12, step_s=3e-3, sequence_s=5e-4,
)  # fmt: skip
READS_AND_COMPUTES = Fitted(
    name="sum", step_s=10e-3, sequence_s=1e-4, prefill_token_s=3e-4, context_token_s=1e-8, pair_s=1e-9,
    kv_bytes_per_token=1e5, num_kv_tokens=10**6,
)  # fmt: skip


class Load(NamedTuple):
    """Requests of (arrival in seconds, prompt tokens, output tokens)."""

    requests: list[tuple[float, int, int]]


SIX_AND_FOUR = Load([(0.0, 64, 150)] * 6 + [(2.0, 1500, 32)] * 4)
MANY_SHORTER = Load([(0.0, 64, 300)] * 6 + [(1.0 + 0.7 * i, 150, 20) for i in range(20)])


class Outcome(NamedTuple):
    gaps: list[float]
    first_tokens: list[float]
    total_s: float
    work: list[StepWork]

    @property
    def p99(self) -> float:
        return sorted(self.gaps)[int(0.99 * len(self.gaps))]


class Pausing:
    """A cost model of a device that once stands still for `pause_s` after the first second."""

    def __init__(self, model: Roofline | Fitted, pause_s: float = 0.0) -> None:
        self.model, self.pause_s, self.work = model, pause_s, list[StepWork]()
        self.sliding_window, self.windowed_share, self.state_bytes, self.num_stages = None, 1.0, 0, 1

    def step_seconds(self, work: StepWork, block_size: int) -> float:
        self.work.append(work)
        seconds = self.model.step_seconds(work, block_size)
        if len(self.work) == 90:
            seconds += self.pause_s
        return seconds

    def swap_seconds(self, num_blocks: int, block_size: int) -> float:
        return self.model.swap_seconds(num_blocks, block_size)


def simulate(
    load: Load, model: Roofline | Fitted, target_step_s: float | None, *, depth: int = 1, pause_s: float = 0.0
) -> Outcome:
    settings = make_settings(
        num_blocks=4000, block_size=16, max_num_seqs=64, max_num_batched_tokens=2048, max_model_len=4096,
        target_step_ms=None if target_step_s is None else 1e3 * target_step_s, max_steps_in_flight=depth,
    )  # fmt: skip
    clock, costs = Clock(), Pausing(model, pause_s)
    executor = SimulatedExecutor(costs, 16, clock)  # type: ignore[arg-type]
    ready = make_core().ready
    core = EngineCore(executor, build_scheduler(settings), ready, max_steps_in_flight=depth, clock=clock)
    waiting, began, last = list(enumerate(load.requests)), dict[str, float](), dict[str, float]()
    outcome = Outcome([], [], 0.0, costs.work)
    while waiting or core.has_unfinished():
        if not core.has_unfinished():
            clock.now = max(clock.now, waiting[0][1][0])
        while waiting and waiting[0][1][0] <= clock.now:
            number, (arrival_s, num_prompt, num_output) = waiting.pop(0)
            executor.expect(number, Script([num_output], END_TOKEN + 1 + number))
            request = make_request(str(number), [number] * num_prompt, max_tokens=num_output, seed=number)
            core.add_request(msgspec.structs.replace(request, arrival_time=arrival_s))
            began[str(number)] = arrival_s
        for output in core.step().outputs:
            name = output.request_id
            assert output.error is None
            if name in last:
                outcome.gaps.append(clock.now - last[name])
            else:
                outcome.first_tokens.append(clock.now - began[name])
            last[name] = clock.now
    return outcome._replace(total_s=clock.now)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("model", [READS_OR_COMPUTES, READS_AND_COMPUTES], ids=lambda model: str(model.name))
@pytest.mark.parametrize("load", [SIX_AND_FOUR, MANY_SHORTER], ids=["four long prompts", "many shorter prompts"])
def test_gaps_stay_short_while_prompts_arrive(load: Load, model: Roofline | Fitted, depth: int) -> None:
    before = simulate(load, model, 0.0, depth=depth)
    now = simulate(load, model, None, depth=depth)
    assert now.p99 <= 3 * median(now.gaps)
    assert max(now.gaps) <= 4 * median(now.gaps)
    assert max(before.gaps) > 2 * max(now.gaps)


def test_first_tokens_and_the_end_come_hardly_later_where_arithmetic_and_memory_overlap() -> None:
    before = simulate(SIX_AND_FOUR, READS_OR_COMPUTES, 0.0)
    now = simulate(SIX_AND_FOUR, READS_OR_COMPUTES, None)
    assert sum(now.first_tokens) <= 1.15 * sum(before.first_tokens)
    assert now.total_s <= before.total_s


def test_a_given_target_is_met() -> None:
    outcome = simulate(SIX_AND_FOUR, READS_OR_COMPUTES, 0.2)
    mixed = [READS_OR_COMPUTES.step_seconds(work, 16) for work in outcome.work if work.num_tokens > 40][1:]
    assert 0.17 < median(mixed) < 0.21


def test_a_pause_of_the_process_is_forgotten_soon() -> None:
    paused = simulate(SIX_AND_FOUR, READS_OR_COMPUTES, None, pause_s=60.0)
    now = simulate(SIX_AND_FOUR, READS_OR_COMPUTES, None)
    assert paused.total_s - 60.0 < 1.05 * now.total_s
    assert sorted(paused.gaps)[-7] < 60.0, "one gap of each of the six"
    assert sorted(paused.gaps)[-7] <= 1.5 * max(now.gaps)


# ---- the parts of it ----


def step(rates: Rates, now: float, *, rows: int, wanted: int = 0, most: int = 2048) -> tuple[float, int]:
    """Plan and carry out a step of `rows` that decode and `wanted` prompt tokens, as many as are granted; returns its
    end and the prompt tokens."""
    allowed = rates.num_prompt_tokens_beside(rows, most) if rows and wanted else 0
    granted = min(wanted, allowed) if rows else wanted
    rates.note_planned(now, rows + (granted > 0), granted, num_allowed=allowed)
    now += max(DECODE_S * (rows > 0), PROMPT_TOKEN_S * (rows + granted))
    rates.note_done(now, 0.0)
    return now, granted


def grants(rates: Rates, now: float, num_steps: int, rows: int = 4, wanted: int = 10**6) -> list[int]:
    found = []
    for _ in range(num_steps):
        now, granted = step(rates, now, rows=rows, wanted=wanted)
        found.append(granted)
    return found


def test_the_first_step_with_others_only_measures_them_and_the_next_ones_converge() -> None:
    found = grants(Rates(), 0.0, 16)
    assert found[:2] == [0, 16], "nothing is known of prompts: the smallest chunk"
    # 2.5 × 30 ms / 3 ms a token, without the four that decode
    assert found[-1] == pytest.approx(21, abs=1)


def test_a_known_rate_of_prompts_is_where_it_starts() -> None:
    rates = Rates()
    now, _ = step(rates, 0.0, rows=0, wanted=1000)
    assert grants(rates, now, 2) == [0, 14 + 1 + 1], "(75 - 30) ms at 333 tokens a second, and at least 16"


def test_prompts_always_advance() -> None:
    assert min(grants(Rates(target_step_s=1e-6), 0.0, 40)) == 16


def test_without_a_target_chunks_are_as_large_as_they_may_be() -> None:
    assert set(grants(Rates(target_step_s=0.0), 0.0, 5)) == {2048}


def test_steps_without_prompts_are_measured_again_after_a_while_and_when_others_decode() -> None:
    rates = Rates()
    found = grants(rates, 0.0, 300)
    assert [place for place, granted in enumerate(found) if not granted] == [0, 129, 258]
    found = grants(rates, 100.0, 30, rows=40)
    assert found.count(0) == 1, "ten times as many rows"
    assert found[-1] > 2 * 21, "they take longer, and so may prompts"


def test_chunks_grow_where_prompts_always_wait() -> None:
    found = grants(Rates(), 0.0, 3000)
    assert max(found[:200]) <= 22, "a load of some seconds keeps the ratio of 2.5"
    assert found[-1] == pytest.approx(7.2 * 10 - 4, rel=0.1), "nearly all steps compute prompts: a ratio of about 7.3"
    sparse = Rates()
    now, largest = 0.0, 0
    for place in range(3000):
        now, granted = step(sparse, now, rows=4, wanted=10**6 if place % 2 else 0)
        largest = max(largest, granted)
    assert largest <= 23, "half of the steps compute none"


def test_steps_beside_the_same_rows_have_few_different_sizes() -> None:
    for rows, unit in ((4, 2), (40, 8), (60, 16)):
        found = {rows + granted for granted in grants(Rates(), 0.0, 60, rows=rows)[30:]}
        assert len(found) <= 2, found
        assert not any(size % unit for size in found), found


def test_measuring_takes_few_of_the_steps_when_rows_come_and_go() -> None:
    rates, now, num_measured = Rates(), 0.0, 0
    for place in range(100):
        now, granted = step(rates, now, rows=2 if place % 2 else 9, wanted=10**6)
        num_measured += granted == 0
    assert num_measured <= 6


def test_sequences_that_decode_are_served_before_older_prompts() -> None:
    core = make_core(max_num_batched_tokens=8, policy="priority")
    core.add_request(msgspec.structs.replace(make_request("long", range(40), max_tokens=1), priority=1))
    core.step()
    core.add_request(make_request("better", [41, 42], max_tokens=4))
    run(core)
    assert isinstance(core.executor, HashExecutor)
    tokens = [[row.num_tokens for row in each.rows] for each in core.executor.steps]
    assert tokens == [[8], [2, 6], [1, 7], [1, 7], [1, 7], [5]]


def test_a_chunk_is_cut_while_a_sequence_decodes_and_whole_when_none_does() -> None:
    core = make_core(max_num_batched_tokens=64, target_step_ms=None)
    core.add_request(make_request("first", range(40), max_tokens=4))
    core.step()
    core.add_request(make_request("second", range(50, 90), max_tokens=1))
    run(core)
    assert isinstance(core.executor, HashExecutor)
    tokens = [[row.num_tokens for row in each.rows] for each in core.executor.steps]
    # the clock counts its readings: a step takes a second, 40 tokens too
    assert tokens == [[40], [1], [1, 40], [1]]


def test_a_fast_model_may_always_take_twenty_milliseconds() -> None:
    pace = Pace()
    decode, mixed = _Planned(0.0, 4, 0, 0, 0), _Planned(0.0, 4, 96, 96, 0)
    for step, seconds in ((decode, 0.001), (mixed, 0.01)):
        pace.note_planned(step)
        pace.note_done(step, seconds)
    assert pace.num_prompt_tokens(4, None) == pytest.approx(0.02 * 100 / 0.01 - 4)
