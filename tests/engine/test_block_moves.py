"""How fast blocks move: from the times of steps that do nothing else."""

from __future__ import annotations

import time
from concurrent.futures import Future

from octavo.core.step import ModelRunnerOutput, SchedulerOutput
from octavo.engine.block_moves import measure_block_moves


class Slow:
    """An executor whose steps take 2 ms, and more for each block: 50 µs to swap it one way, 20 µs to copy it."""

    def submit(self, step: SchedulerOutput) -> Future[ModelRunnerOutput]:
        ops = step.block_ops
        blocks = (*ops.swap_outs, *ops.swap_ins, *ops.copies)
        assert all(0 < id_ <= 40 for move in blocks for id_ in (move.source, move.target))
        ends_at = time.perf_counter() + 2e-3
        ends_at += 50e-6 * (len(ops.swap_outs) + len(ops.swap_ins)) + 20e-6 * len(ops.copies)
        while time.perf_counter() < ends_at:
            pass
        result: Future[ModelRunnerOutput] = Future()
        result.set_result(ModelRunnerOutput(step_id=step.step_id, rows=[]))
        return result

    def call(self, method: str, *arguments: object) -> object:
        raise AssertionError

    def check_health(self) -> None: ...

    def shutdown(self) -> None: ...


def test_rates_are_bytes_per_second_without_what_a_step_costs() -> None:
    rates = measure_block_moves(Slow(), 40, 40, block_bytes=1000)
    assert rates.swap_bytes_per_s is not None
    assert 0.5 < rates.swap_bytes_per_s / (1000 / 50e-6) < 1.1
    assert 0.5 < rates.copy_bytes_per_s / (1000 / 20e-6) < 1.1


def test_without_swap_space_nothing_is_swapped() -> None:
    assert measure_block_moves(Slow(), 4, 0, block_bytes=1000).swap_bytes_per_s is None
