"""`octavo bench calibrate`: coefficients of the engine on this machine, and a check of them."""

from __future__ import annotations

import json
from concurrent.futures import Future
from pathlib import Path

import pytest

from octavo.cli.calibrate import TimedStep, _typical_seconds, measure_block_moves
from octavo.cli.main import main
from octavo.config.args import EngineArgs
from octavo.config.resolve import configure
from octavo.config.sources import gather
from octavo.core.cache_limits import CacheLimits
from octavo.core.step import ModelRunnerOutput, SchedulerOutput
from octavo.simulate.cost_model import Fitted, MeasuredStep, StepWork
from octavo.simulate.presets import load_cost_model
from tests.cli.conftest import Command

GRID = ("--batch-sizes", "1,3", "--input-lens", "4,20")
SMALL = ("--repetitions", "2", "--max-num-seqs", "4")


def test_a_cost_model_is_fitted_checked_and_written(
    tiny_model: str, tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("octavo.cli.calibrate._NUM_CHECKED", 8)  # requests of each load: 40 take three times as long
    file = tmp_path / "costs.json"
    config = tmp_path / "engine.yaml"
    speculative = '{"method": "ngram", "prompt_lookup_min": 3}'
    files = ("--output", str(file), "--engine-config", str(config), "--speculative-config", speculative)
    line = json.loads(command("bench", "calibrate", "--model", tiny_model, *GRID, *SMALL, *files).out)
    model = load_cost_model(str(file))
    assert isinstance(model, Fitted)
    assert line["num_steps"] > 4 * 24
    assert min(model.swap_bytes_per_s, model.copy_bytes_per_s, model.prefill_tokens_per_s) > 0
    # an engine takes the rates
    resolved = configure(gather(EngineArgs, {"model": tiny_model}, config_file=str(config)))
    assert resolved.speculative is not None
    assert resolved.speculative.prompt_lookup_min == 3
    assert [tokens for tokens, _ in resolved.speculative.step_ms] == [1, 2, 3, 4]
    assert [list(each) for each in resolved.speculative.step_ms] == line["step_ms"]
    scheduler = resolved.scheduler
    assert scheduler.swap_bytes_per_s == pytest.approx(model.swap_bytes_per_s, rel=1e-4)
    assert scheduler.prefill_tokens_per_s == pytest.approx(model.prefill_tokens_per_s, rel=1e-4)
    assert model.step_s + model.sequence_s > 0
    assert model.kv_bytes_per_token >= 2 * 2 * 2 * 8 * 4  # keys and values, layers, heads, head size, float32
    kinds = [check.load for check in model.checks]
    assert {"burst", "poisson at half load", "bursts at half load", "long prompts"} <= set(kinds)
    assert [check["load"] for check in line["checks"]] == kinds
    # and octavo simulate takes it
    shown = command("simulate", "--cost-model", str(file), "--num-requests", "5", "--max-model-len", "64").out
    assert "fitted to measured steps" in shown
    assert "the most similar load that was measured and not fitted to" in shown


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--batch-sizes", "0,3"), "batch_sizes is 0, must be at least 1"),
        (("--max-model-len", "24"), "max_model_len is 24, must be at least 28 here"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    arguments: tuple[str, ...], message: str, tiny_model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "calibrate", "--model", tiny_model, *SMALL, *arguments]) != 0
    assert message in capsys.readouterr().err


def test_interrupted_steps_count_only_where_there_are_no_others() -> None:
    def step(seconds: float, *, was_interrupted: bool = False) -> TimedStep:
        return TimedStep(MeasuredStep(StepWork(1, 1), seconds), was_interrupted)

    assert _typical_seconds([step(9.0, was_interrupted=True), step(3.0), step(1.0), step(2.0)]) == 2.0
    assert _typical_seconds([step(9.0, was_interrupted=True), step(8.0, was_interrupted=True)]) == 8.0


class TimedExecutor:
    """Its steps take 2 ms, and more for each block: 50 µs to swap it one way, 20 µs to copy it. Two of three
    are held up."""

    def __init__(self) -> None:
        self.now = 0.0
        self.num_steps = 0

    def clock(self) -> float:
        return self.now

    def submit(self, step: SchedulerOutput) -> Future[ModelRunnerOutput]:
        ops = step.block_ops
        moves = (*ops.swap_outs, *ops.swap_ins, *ops.copies)
        assert all(0 < id_ <= 40 for move in moves for id_ in (move.source, move.target))
        self.now += 2e-3 + 50e-6 * (len(ops.swap_outs) + len(ops.swap_ins)) + 20e-6 * len(ops.copies)
        self.now += self.num_steps % 3 * 1e-3
        self.num_steps += 1
        result: Future[ModelRunnerOutput] = Future()
        result.set_result(ModelRunnerOutput(step_id=step.step_id, rows=[]))
        return result


def test_rates_are_bytes_per_second_without_what_a_step_costs() -> None:
    executor = TimedExecutor()
    rates = measure_block_moves(
        executor.submit, CacheLimits.of_one_group(40, 16, num_host_blocks=40, block_bytes=1000), executor.clock
    )
    assert rates.swap_bytes_per_s == pytest.approx(1000 / 50e-6)
    assert rates.copy_bytes_per_s == pytest.approx(1000 / 20e-6)


def test_without_swap_space_nothing_is_swapped() -> None:
    executor = TimedExecutor()
    rates = measure_block_moves(executor.submit, CacheLimits.of_one_group(4, 16, block_bytes=1000), executor.clock)
    assert rates.swap_bytes_per_s is None
    assert rates.copy_bytes_per_s > 0
