"""The executor without a model: when sequences end, what time it takes, and which beams it proposes."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest

from octavo.core.messages import CoreReady
from octavo.core.step import SchedulerOutput
from octavo.engine.engine_core import EngineCore
from octavo.errors import ConfigError
from octavo.scheduler.build import SchedulerSettings, build_scheduler
from octavo.simulate.cost_model import CostModel, Roofline, StepWork, work_of
from octavo.simulate.executor import END_TOKEN, Clock, Script, SimulatedExecutor, TokenGaps, gap_seconds
from tests.fakes.engine import Collected, make_request, run
from tests.simulate.parts import make_costs, make_settings

STREAM = END_TOKEN + 1000


class Watching(SimulatedExecutor):
    """Keeps the steps, and the work that it was charged for."""

    def __init__(self, settings: SchedulerSettings, costs: CostModel) -> None:
        self.clock = Clock()
        super().__init__(costs, settings.cache.block_size, self.clock)
        self.steps: list[SchedulerOutput] = []
        self.works: list[StepWork] = []

    def _execute(self, step):  # type: ignore[no-untyped-def]
        output, work = super()._execute(step)
        self.steps.append(step)
        self.works.append(work)
        return output, work


def make_core(settings: SchedulerSettings, costs: CostModel | None = None) -> tuple[EngineCore, Watching]:
    executor = Watching(settings, costs or make_costs())
    ready = CoreReady(cache=settings.limits, max_model_len=256, vocab_size=0, plan="")
    depth = settings.scheduler.max_steps_in_flight
    return EngineCore(
        executor, build_scheduler(settings), ready, max_steps_in_flight=depth, clock=executor.clock
    ), executor


def lengths(collected: Collected) -> dict[str, dict[int, int]]:
    return {name: {i: len(ids) for i, ids in by_index.items()} for name, by_index in collected.token_ids.items()}


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_every_sequence_ends_where_its_script_says(depth: int) -> None:
    core, executor = make_core(make_settings(num_blocks=12, depth=depth, max_num_seqs=7))
    requests = []
    for seed, (n, output_len) in enumerate([(1, 5), (2, 9), (1, 1), (3, 8)]):
        # the last sequence of the last request is shorter than its siblings
        lengths_of = [output_len] * n if seed < 3 else [8, 8, 3]
        executor.expect(seed, Script(lengths_of, STREAM + 100 * seed))
        requests.append(
            make_request(f"{seed}", range(3 * seed + 2), n=n, max_tokens=9, seed=seed, end_token_ids=(END_TOKEN,))
        )
    collected = run(core, requests)
    assert core.stats().num_preemptions > 0
    assert lengths(collected) == {"0": {0: 5}, "1": {0: 9, 1: 9}, "2": {0: 1}, "3": {0: 8, 1: 8, 2: 3}}
    assert all(ids[-1] == END_TOKEN for each in collected.token_ids.values() for ids in each.values())
    assert collected.token_ids["1"][1][:-1] == [STREAM + 101] * 8


@pytest.mark.parametrize(("window", "num_blocks"), [(None, 14), (6, 8)])
def test_work_is_that_of_the_step(window: int | None, num_blocks: int) -> None:
    settings = make_settings(
        num_blocks=num_blocks,
        num_host_blocks=9,
        preemption_mode="swap",
        sliding_window=window,
        max_num_batched_tokens=9,
    )
    core, executor = make_core(settings, make_costs(sliding_window=window))
    for seed in range(5):
        executor.expect(seed, Script([11], STREAM + 100 * seed))
    run(core, [make_request(f"{seed}", range(9), n=1 + seed % 2, max_tokens=11, seed=seed) for seed in range(5)])
    assert core.stats().num_preemptions_by_swap > 0
    assert executor.works == [work_of(step, window) for step in executor.steps]


def test_a_step_takes_what_the_model_says_and_steps_do_not_overlap() -> None:
    for depth in (1, 2):
        core, executor = make_core(make_settings(depth=depth), make_costs(step_s=2.0, prefill_token_s=0.5))
        executor.expect(0, Script([3], STREAM))
        core.add_request(make_request("a", range(6), max_tokens=3, seed=0, end_token_ids=(END_TOKEN,)))
        times = []
        while core.has_unfinished():
            core.step()
            times.append(executor.clock.now)
        assert times[:3] == [2.0 + 6 * 0.5, 7.0, 9.0]
        assert executor.busy_s == times[-1]


def test_beams_fork_and_have_falling_probabilities() -> None:
    core, executor = make_core(make_settings(max_num_seqs=8, num_blocks=128))
    for seed in range(4):
        executor.expect(seed, Script([12], STREAM + 100 * seed))
    requests = [
        make_request(f"{seed}", range(7), n=4, use_beam_search=True, max_tokens=12, seed=seed) for seed in range(4)
    ]
    collected = run(core, requests)
    assert lengths(collected) == {str(seed): dict.fromkeys(range(4), 12) for seed in range(4)}
    for each in collected.token_ids.values():
        assert len({tuple(ids) for ids in each.values()}) == 4
    for scores in collected.logprobs.values():
        sums = [math.fsum(values) for values in scores.values()]
        assert sums == sorted(sums, reverse=True)
    assert any(step.block_ops.copies for step in executor.steps)


def test_it_has_no_calls() -> None:
    _, executor = make_core(make_settings())
    with pytest.raises(ConfigError, match="memory_plan is not a call of a simulated worker"):
        executor.call("memory_plan")


def test_times_between_tokens_are_counted_for_each_sequence() -> None:
    gaps = TokenGaps()
    gaps.note([1], 1.0)
    gaps.note([1, 2], 1.5)
    gaps.note([1], 2.0)
    gaps.note([1, 2], 4.0)
    found = {round(gap_seconds(key), 1): count for key, count in gaps.counts.items()}
    assert found == {0.5: 2, 2.0: 1, 2.5: 1}


def staged(num_stages: int, step_s: float = 12.0) -> Roofline:
    """Every step takes `step_s` in all stages together."""
    facts = {"weight_bytes": 0, "flops_per_token": 0, "flops_per_pair": 0, "device_bytes": 1, "sequence_s": 0}
    rates = {"bytes_per_s": 1e30, "flops_per_s": 1, "swap_bytes_per_s": 1, "kv_bytes_per_token": 1}
    return Roofline(name="staged", **facts, **rates, step_s=step_s, num_stages=num_stages)


def seconds_and_tokens(num_stages: int, num_requests: int) -> tuple[float, Any]:
    settings = msgspec.structs.replace(make_settings(depth=num_stages), sends_tokens=num_stages > 1)
    core, executor = make_core(settings, staged(num_stages))
    requests = []
    for seed in range(num_requests):
        executor.expect(seed, Script([9], STREAM + 100 * seed))
        requests.append(make_request(f"{seed}", [seed], max_tokens=9, seed=seed, end_token_ids=(END_TOKEN,)))
    collected = run(core, requests)
    return executor.clock.now, collected.token_ids


def test_stages_work_on_different_steps_at_once() -> None:
    """A token passes all stages before the next one of its sequence: one sequence is not faster, several are."""
    alone, tokens = seconds_and_tokens(1, 4)
    assert alone == 9 * 12
    assert seconds_and_tokens(4, 1)[0] == 9 * 12
    in_four, same_tokens = seconds_and_tokens(4, 4)
    assert same_tokens == tokens
    # with a sequence in each of the four stages nothing waits, but for filling and emptying the pipeline
    assert in_four <= 9 * 12 + 3 * 3
    many, _ = seconds_and_tokens(1, 8)
    in_four, _ = seconds_and_tokens(4, 8)
    assert many == 9 * 12
    assert in_four <= 9 * 12 + 3 * 3
