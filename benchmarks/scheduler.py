"""What the control plane costs: `python -m benchmarks.scheduler`. Medians over the steps, forks or swaps.

Steps: microseconds to plan a decode step and to take its results in; the executor answers a constant token at once.
Forks: microseconds to fork a sequence by the number of its blocks, and to make the fork's next token writable. Swaps:
microseconds to plan a group's way to the host and back, and GB/s at which the cache engine moves its blocks (of the
Qwen3-0.6B's size in bfloat16).
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any, Literal, NamedTuple

import torch

from octavo.attention.backend import CacheLayout
from octavo.cli.report import report
from octavo.config.schema import DeviceConfig, SchedulerConfig, SpeculativeConfig
from octavo.core.cache_limits import CacheLimits
from octavo.core.messages import EngineCoreRequest
from octavo.core.sampling_params import SamplingParams
from octavo.core.sequence import SequenceGroup, SequenceStatus
from octavo.core.step import (
    BlockCopy,
    BlockOps,
    ModelRunnerOutput,
    RowOutput,
    SchedulerOutput,
    TokenLogprobs,
)
from octavo.devices.device import open_device
from octavo.kv_cache.block_manager import BlockManager
from octavo.platform import Platform
from octavo.scheduler.budget import TokenBudget
from octavo.scheduler.plan import StepPlan
from octavo.scheduler.policies import POLICIES, make_policy
from octavo.scheduler.policy import Policy
from octavo.scheduler.rates import Rates
from octavo.scheduler.registry import Registry
from octavo.scheduler.scheduler import Scheduler
from octavo.speculation.speculation import Speculation
from octavo.worker.cache_engine import Arena, CacheEngine

BLOCK_SIZE = 16
NUM_LAYERS, NUM_KV_HEADS, HEAD_DIM = 28, 8, 128
"""Those of the Qwen3-0.6B."""
TOKEN = TokenLogprobs(token_id=1, logprob=-1.0)


def answer(step: SchedulerOutput) -> ModelRunnerOutput:
    rows = [
        RowOutput(seq_id=row.seq_id, epoch=row.epoch, tokens=[TOKEN] if row.num_samples else []) for row in step.rows
    ]
    return ModelRunnerOutput(step_id=step.step_id, rows=rows)


def scheduling(**options: Any) -> SchedulerConfig:
    return SchedulerConfig(max_model_len=1 << 20, **options)


class Load(NamedTuple):
    """What is measured beside the sequences that decode.

    num_waiting: groups that do not fit behind them. num_adapters: that these use, and that have no slot; 0 for none.
    method: of speculation; None for none.
    """

    num_waiting: int
    num_steps: int
    prompt_len: int
    method: str | None
    policy: Literal["fcfs", "priority", "fair-share", "deadline", "prefix-match"]
    num_adapters: int


def build(num_sequences: int, load: Load) -> Scheduler:
    """Return a scheduler with the requests of a load, in a pool in which all that decode fit."""
    blocks_each = (load.prompt_len + 2 * load.num_steps) // BLOCK_SIZE + 2
    manager = BlockManager(CacheLimits.of_one_group(num_sequences * blocks_each, BLOCK_SIZE), watermark=0.01)
    config = scheduling(
        max_num_seqs=num_sequences + bool(load.num_adapters),  # a sequence is free, and no slot
        max_num_batched_tokens=max(8192, num_sequences),
        max_loras=1 if load.num_adapters else 0,
        scheduling_policy=load.policy,
    )
    rates = Rates(target_step_s=0.0)  # time stands still here
    proposer = None
    if load.method is not None:
        proposer = Speculation(SpeculativeConfig(method=load.method, model=""))  # type: ignore[arg-type]
    return Scheduler(manager, config, make_policy(config, manager, rates), rates, proposer=proposer)


def measure_steps(num_sequences: int, load: Load) -> dict[str, float]:
    """Medians in µs per step with `num_sequences` decoding."""
    num_waiting, num_steps, prompt_len = load[:3]
    max_tokens = 2 * num_steps  # filling the batch takes steps of its own
    scheduler = build(num_sequences, load)
    params = SamplingParams(max_tokens=max_tokens, seed=0)
    for i in range(num_sequences + num_waiting):
        prompt = [i % 1000, i // 1000, *range(prompt_len - 2)]
        request = EngineCoreRequest(request_id=str(i), prompt_token_ids=prompt, params=params, arrival_time=float(i))
        if load.num_adapters:
            request.adapter = "runs" if i < num_sequences else f"waits{i % load.num_adapters}"
        scheduler.add_together([request])
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


def running_group(registry: Registry, num_blocks: int, max_tokens: int = 1) -> SequenceGroup:
    """A group with a computed prompt of so many full blocks but one token, on the device."""
    params = SamplingParams(max_tokens=max_tokens, seed=0)
    prompt = list(range(num_blocks * BLOCK_SIZE - 1))
    request = EngineCoreRequest(request_id="a", prompt_token_ids=prompt, params=params, arrival_time=0.0)
    (group,) = registry.new_groups([request])
    registry.add(group)
    sequence = group.live[0]
    registry.block_manager.allocate(sequence, len(prompt), registry.block_manager.find_prefix(group, sequence, 0))
    registry.admit(group, "", 0.0)
    sequence.num_computed_tokens = len(prompt)
    return group


def measure_forks(num_blocks: int, repetitions: int) -> dict[str, float]:
    """Medians in µs for a sequence of `num_blocks`: its fork, the copy of the last block, to which the fork writes, and
    the fork's end."""
    manager = BlockManager(CacheLimits.of_one_group(num_blocks + 8, BLOCK_SIZE), enable_prefix_caching=False)
    registry = Registry(manager, Policy())
    group = running_group(registry, num_blocks)
    parent = group.live[0]
    end = len(parent.token_ids)
    fork_us, write_us, end_us = [], [], []
    for index in range(1, repetitions + 1):
        began = time.perf_counter()
        child = registry.fork(group, parent, index)
        forked = time.perf_counter()
        growth = manager.append_slots(child, end, end + 1)
        written = time.perf_counter()
        assert growth is not None
        assert len(growth.copies) == 1
        registry.drop_sequence(group, child)
        ended = time.perf_counter()
        fork_us.append(1e6 * (forked - began))
        write_us.append(1e6 * (written - forked))
        end_us.append(1e6 * (ended - written))
    return {
        "fork_us": round(statistics.median(fork_us), 2),
        "first_write_us": round(statistics.median(write_us), 2),
        "drop_us": round(statistics.median(end_us), 2),
    }


def measure_swaps(num_blocks: int, repetitions: int) -> dict[str, float]:
    """Medians in µs to plan the way of a group of `num_blocks` to the host, and back."""
    manager = BlockManager(
        CacheLimits.of_one_group(num_blocks + 8, BLOCK_SIZE, num_host_blocks=num_blocks), enable_prefix_caching=False
    )
    scheduler = Scheduler(manager, scheduling(preemption_mode="swap"))
    registry, preemption, admission = scheduler._registry, scheduler._preemption, scheduler._admission
    group = running_group(registry, num_blocks)
    out_us, in_us = [], []
    for _ in range(repetitions):
        plan = StepPlan(TokenBudget(1))
        began = time.perf_counter()
        preemption.preempt(group, plan)
        done = time.perf_counter()
        assert group.status is SequenceStatus.SWAPPED
        assert len(plan.swap_outs) == num_blocks
        out_us.append(1e6 * (done - began))
        plan = StepPlan(TokenBudget(1))
        began = time.perf_counter()
        admission.admit(plan, 0.0, lambda: registry.swapped.peek(0.0))
        done = time.perf_counter()
        assert group.status is SequenceStatus.RUNNING
        in_us.append(1e6 * (done - began))
    return {
        "swap_out_us": round(statistics.median(out_us), 1),
        "swap_in_us": round(statistics.median(in_us), 1),
    }


def measure_cache_engine(num_blocks: int, threads: int, repetitions: int) -> dict[str, float]:
    """Medians in GB/s of keys and values that a cache engine moves out and in, `num_blocks` at a time."""
    shape = (2, num_blocks + 1, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM)
    device = open_device(DeviceConfig(threads=threads), Platform.detect())
    engine = CacheEngine([Arena(range(NUM_LAYERS), CacheLayout(shape, torch.bfloat16), num_blocks)], device)
    moves = [BlockCopy(source, target) for source, target in enumerate(range(num_blocks, 0, -1), 1)]
    num_bytes = num_blocks * NUM_LAYERS * 2 * NUM_KV_HEADS * BLOCK_SIZE * HEAD_DIM * 2

    def gb_per_s(ops: BlockOps) -> float:
        engine.apply(ops)  # memory is there from its first write on
        seconds = []
        for _ in range(repetitions):
            began = time.perf_counter()
            engine.apply(ops)
            seconds.append(time.perf_counter() - began)
        return round(num_bytes / statistics.median(seconds) / 1e9, 2)

    return {"out_gb_per_s": gb_per_s(BlockOps(swap_outs=moves)), "in_gb_per_s": gb_per_s(BlockOps(swap_ins=moves))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 64, 256, 1000])
    parser.add_argument("--waiting", type=int, default=0, help="groups that wait behind the running ones")
    parser.add_argument("--policy", choices=tuple(POLICIES), default="fcfs")
    parser.add_argument("--adapters", type=int, default=0, help="that the waiting groups use, and that have no slot")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--prompt-len", type=int, default=100)
    parser.add_argument("--blocks", type=int, nargs="*", default=[8, 64, 512], help="of sequences that fork and swap")
    parser.add_argument("--moved-blocks", type=int, default=256, help="that the cache engine moves at once; 0: none")
    parser.add_argument("--threads", type=int, default=1, help="of the cache engine")
    parser.add_argument("--speculation", choices=("ngram", "suffix", "draft_model"), help="method of speculation")
    args = parser.parse_args()
    load = Load(args.waiting, args.steps, args.prompt_len, args.speculation, args.policy, args.adapters)
    figures = {str(n): measure_steps(n, load) for n in args.sequences}
    for n, figure in figures.items():
        print(f"{n:>6} sequences: schedule {figure['schedule_us']:8.1f} µs, update {figure['update_us']:8.1f} µs")
    result: dict[str, Any] = {"us_per_step": figures}
    result["us_per_fork"] = {str(k): measure_forks(k, 1000) for k in args.blocks}
    result["us_per_swap"] = {str(k): measure_swaps(k, 300) for k in args.blocks}
    for k in map(str, args.blocks):
        fork, swap = result["us_per_fork"][k], result["us_per_swap"][k]
        print(
            f"{k:>6} blocks: fork {fork['fork_us']:.1f} µs, first write {fork['first_write_us']:.1f} µs, "
            f"drop {fork['drop_us']:.1f} µs; swap out {swap['swap_out_us']:.0f} µs, in {swap['swap_in_us']:.0f} µs"
        )
    if args.moved_blocks:
        result["cache_engine"] = moved = measure_cache_engine(args.moved_blocks, args.threads, 9)
        print(f"cache engine: swap out {moved['out_gb_per_s']:.1f} GB/s, in {moved['in_gb_per_s']:.1f} GB/s")
    report("scheduler", {"arguments": vars(args)}, result)


if __name__ == "__main__":
    main()
