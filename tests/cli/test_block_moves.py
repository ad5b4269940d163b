"""How fast blocks move: from the times of steps that do nothing else."""

from __future__ import annotations

from concurrent.futures import Future

import pytest

from octavo.cli.block_moves import measure_block_moves
from octavo.core.cache_limits import CacheLimits
from octavo.core.step import ModelRunnerOutput, SchedulerOutput


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
