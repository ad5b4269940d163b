"""Microseconds that planning a decode step and taking in its results cost: `python -m benchmarks.scheduler`.

The executor answers a constant token at once, so only the control plane is timed. Medians over the steps.
"""

from __future__ import annotations

import argparse
import statistics
import time

from octavo.cli.report import report
from octavo.core.messages import EngineCoreRequest
from octavo.core.sampling_params import SamplingParams
from octavo.core.step import ModelRunnerOutput, RowOutput, SchedulerOutput, SequenceOutput, TokenLogprobs
from octavo.kv_cache.block_manager import BlockManager
from octavo.scheduler.scheduler import Scheduler

TOKEN = SequenceOutput(index=0, token=TokenLogprobs(token_id=1, logprob=-1.0))


def answer(step: SchedulerOutput) -> ModelRunnerOutput:
    rows = [
        RowOutput(seq_id=row.seq_id, epoch=row.epoch, samples=[TOKEN] if row.num_samples else []) for row in step.rows
    ]
    return ModelRunnerOutput(step_id=step.step_id, rows=rows)


def measure(num_sequences: int, num_waiting: int, num_steps: int, prompt_len: int) -> dict[str, float]:
    """Medians in µs per step with `num_sequences` decoding, and `num_waiting` groups that do not fit behind them."""
    block_size = 16
    max_tokens = 2 * num_steps  # filling the batch takes steps of its own
    blocks_each = (prompt_len + max_tokens) // block_size + 2
    scheduler = Scheduler(
        BlockManager(num_sequences * blocks_each, block_size, 0.01, enable_prefix_caching=True),
        max_num_seqs=num_sequences,
        max_num_batched_tokens=max(8192, num_sequences),
    )
    params = SamplingParams(max_tokens=max_tokens, seed=0)
    for i in range(num_sequences + num_waiting):
        prompt = [i % 1000, i // 1000, *range(prompt_len - 2)]
        scheduler.add(
            EngineCoreRequest(request_id=str(i), prompt_token_ids=prompt, params=params, arrival_time=float(i))
        )
    while True:
        step = scheduler.schedule(0.0)
        assert step is not None
        scheduler.update(answer(step), 0.0)
        if len(step.rows) == num_sequences and all(row.num_tokens == 1 for row in step.rows):
            break
    schedule_us, update_us = [], []
    for _ in range(num_steps - 2):
        began = time.perf_counter()
        step = scheduler.schedule(0.0)
        planned = time.perf_counter()
        assert step is not None
        assert len(step.rows) == num_sequences
        results = answer(step)
        answered = time.perf_counter()
        scheduler.update(results, 0.0)
        done = time.perf_counter()
        schedule_us.append((planned - began) * 1e6)
        update_us.append((done - answered) * 1e6)
    return {
        "schedule_us": round(statistics.median(schedule_us), 1),
        "update_us": round(statistics.median(update_us), 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 64, 256, 1000])
    parser.add_argument("--waiting", type=int, default=0, help="groups that wait behind the running ones")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--prompt-len", type=int, default=100)
    args = parser.parse_args()
    figures = {str(n): measure(n, args.waiting, args.steps, args.prompt_len) for n in args.sequences}
    for n, figure in figures.items():
        print(f"{n:>6} sequences: schedule {figure['schedule_us']:8.1f} µs, update {figure['update_us']:8.1f} µs")
    report("scheduler", {"arguments": vars(args)}, {"us_per_step": figures})


if __name__ == "__main__":
    main()
