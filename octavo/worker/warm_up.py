"""The largest steps, made once at start where memory is the device's own: what does not fit is refused then."""

from __future__ import annotations

import logging
from typing import Final

import torch

from octavo.config.explain import MemoryPlan, render_bytes
from octavo.config.schema import SchedulerConfig
from octavo.core.arithmetic import num_blocks_for
from octavo.core.cache_limits import CacheLimits
from octavo.core.model_shape import Encoded
from octavo.core.sampling_params import SamplingParams
from octavo.core.step import BlockOps, NewSequence, ScheduledSequence, SchedulerOutput
from octavo.devices.device import Device
from octavo.errors import ConfigError
from octavo.worker.model_runner import ModelRunner

_PARAMS: Final = (
    SamplingParams(temperature=0.8, top_p=0.95, top_k=200, repetition_penalty=1.1, logprobs=20, seed=0),
    SamplingParams(temperature=0.8, top_p=0.95, seed=0),
)
"""Of the steps of one kind, one after the other: the first needs every stage of sampling, and the second what
devices launch for top-p alone. Such a decode step is captured when it comes for the second time."""

_log = logging.getLogger(__name__)


def warm_up(runner: ModelRunner, device: Device, scheduler: SchedulerConfig, plan: MemoryPlan) -> None:
    """Execute the largest prefill and the largest decode steps, the latter twice: then they are captured.

    Models whose layers read the output of an encoder make none. What the KV caches hold is lost. Raises ConfigError
    where the steps do not fit beside weights and KV caches.
    """
    if any(isinstance(each.keeps, Encoded) for each in plan.cache_groups):
        return
    num_rows = min(scheduler.max_num_seqs, scheduler.max_num_batched_tokens)
    num_tokens = min(scheduler.max_num_batched_tokens, num_rows * plan.max_model_len)
    peak_bytes = device.measure_peak()
    for tokens, times in ((num_tokens, 1), (num_rows, 2)):
        for params in _PARAMS * times:
            try:
                _run(runner, plan.cache, num_rows, tokens, params)
            except torch.OutOfMemoryError as error:
                raise ConfigError(
                    f"out of memory in a step of {tokens:,} tokens of {num_rows:,} sequences, beside weights of "
                    f"{render_bytes(plan.weights_bytes)} and KV caches of {render_bytes(plan.kv_bytes)}; "
                    f"{render_bytes(plan.activation_bytes)} were planned for it: lower gpu_memory_utilization, "
                    "max_num_batched_tokens or max_num_seqs"
                ) from error
    taken, planned = peak_bytes(), plan.activation_bytes
    level = logging.WARNING if taken > planned else logging.INFO
    _log.log(level, "largest steps: %s measured, %s planned", render_bytes(taken), render_bytes(planned))


def _run(runner: ModelRunner, limits: CacheLimits, num_rows: int, num_tokens: int, params: SamplingParams) -> None:
    """Execute a step of new sequences, and forget them."""
    runner.execute(_step(limits, num_rows, num_tokens, params))
    ids = [-1 - row for row in range(num_rows)]
    runner.execute(SchedulerOutput(step_id=-1, new_sequences=[], rows=[], finished_ids=ids, block_ops=BlockOps()))


def _step(limits: CacheLimits, num_rows: int, num_tokens: int, params: SamplingParams) -> SchedulerOutput:
    """Return a step of new sequences with negative ids, which share blocks where there are too few for all."""
    each, more = divmod(num_tokens, num_rows)
    sequences, rows, given = [], [], 0
    for row in range(num_rows):
        length = each + (row < more)
        count = num_blocks_for(length, limits.block_size)
        tables = [[1 + block % group.num_blocks for block in range(given, given + count)] for group in limits.groups]
        given += count
        sequences.append(
            NewSequence(
                seq_id=-1 - row,
                index=0,
                epoch=0,
                token_ids=[0] * length,
                num_prompt_tokens=length,
                block_tables=tables,
                params=params,
            )
        )
        rows.append(ScheduledSequence(seq_id=-1 - row, epoch=0, start=0, num_tokens=length, num_samples=1))
    return SchedulerOutput(step_id=-1, new_sequences=sequences, rows=rows, finished_ids=[], block_ops=BlockOps())
