"""Measures how fast an engine moves blocks, by steps that do nothing else."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Final, NamedTuple

from octavo.core.cache_limits import CacheLimits
from octavo.core.step import BlockCopy, BlockOps, ModelRunnerOutput, SchedulerOutput

Submit = Callable[[SchedulerOutput], Future[ModelRunnerOutput]]

_REPETITIONS: Final = 7
_MOST_BLOCKS: Final = 256


class BlockMoveRates(NamedTuple):
    """Bytes of keys and values per second: between device and host (None without swap space), and within the device."""

    swap_bytes_per_s: float | None
    copy_bytes_per_s: float


def measure_block_moves(
    submit: Submit, limits: CacheLimits, clock: Callable[[], float] = time.perf_counter
) -> BlockMoveRates:
    """Return the rates of the executor whose `submit` this is, without the other costs of a step.

    They are measured in the first cache group; the content of its blocks is lost, so no request may run.
    """
    num_blocks, block_bytes = limits.groups[0].num_blocks, limits.groups[0].block_bytes
    copied = max(1, min(num_blocks // 2, _MOST_BLOCKS))
    copies = [BlockCopy(1 + i, 1 + (copied + i) % num_blocks) for i in range(copied)]
    swapped = min(num_blocks, limits.groups[0].num_host_blocks, _MOST_BLOCKS)
    moves = [BlockCopy(1 + i, 1 + i) for i in range(swapped)]
    idle, copy, swap = (
        _least_seconds(submit, ops, clock)
        for ops in (BlockOps(), BlockOps(copies=copies), BlockOps(swap_outs=moves, swap_ins=moves))
    )
    return BlockMoveRates(
        swap_bytes_per_s=_rate(2 * swapped * block_bytes, swap - idle) if swapped else None,
        copy_bytes_per_s=_rate(copied * block_bytes, copy - idle),
    )


def _rate(num_bytes: int, seconds: float) -> float:
    # the clock cannot see less than this
    return num_bytes / max(seconds, 1e-7)


def _least_seconds(submit: Submit, ops: BlockOps, clock: Callable[[], float]) -> float:
    """Return the least seconds of a step: other programs only add to them, and the first step touches new memory."""
    step = SchedulerOutput(step_id=-1, new_sequences=[], rows=[], finished_ids=[], block_ops=ops)
    seconds = []
    for _ in range(_REPETITIONS):
        began = clock()
        submit(step).result()
        seconds.append(clock() - began)
    return min(seconds[1:])
