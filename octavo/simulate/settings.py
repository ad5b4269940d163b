"""The settings of simulated schedulers: engine arguments, on a device that a cost model describes."""

from __future__ import annotations

import dataclasses
from typing import Final

from octavo.config.args import EngineArgs
from octavo.config.resolve import cache_config, scheduler_config
from octavo.config.schema import SchedulerConfig
from octavo.core.arithmetic import max_blocks_of_group
from octavo.core.cache_limits import LIVE_STATES, CacheLimits, GroupLimits
from octavo.errors import ConfigError
from octavo.scheduler.build import SchedulerSettings
from octavo.scheduler.rates import PreemptionCosts
from octavo.simulate.cost_model import CostModel

_GIB: Final = 1 << 30


def engine_settings(args: EngineArgs, model: CostModel, *, max_model_len: int) -> SchedulerSettings:
    """Return settings with the cache that fits into the memory of the cost model's device. Raises ConfigError."""
    num_blocks = args.num_gpu_blocks_override or model.kv_tokens(args.gpu_memory_utilization) // args.block_size
    if num_blocks < 1:
        raise ConfigError(
            f"{model.name} leaves no room for a KV block beside the weights; raise gpu_memory_utilization, choose "
            "another device or more of them (tensor_parallel_size, pipeline_parallel_size), or give "
            "num_gpu_blocks_override"
        )
    # as many steps in flight as stages
    staged = dataclasses.replace(args, max_steps_in_flight=args.max_steps_in_flight or model.num_stages)
    scheduler = scheduler_config(staged, max_model_len)
    return SchedulerSettings(
        cache=cache_config(args, "bfloat16"),
        scheduler=scheduler,
        sends_tokens=model.num_stages > 1,
        limits=CacheLimits(
            block_size=args.block_size,
            groups=_groups(args, model, scheduler, num_blocks),
            num_lookahead=scheduler.num_lookahead_slots,
        ),
        preemption_costs=PreemptionCosts(
            prefill_tokens_per_s=model.prefill_tokens_per_s, swap_bytes_per_s=model.swap_bytes_per_s
        ),
    )


def _groups(args: EngineArgs, model: CostModel, scheduler: SchedulerConfig, num_blocks: int) -> tuple[GroupLimits, ...]:
    """Return the limits of the model's cache groups, each with room for as many sequences of full length as the others.

    num_blocks: number of blocks that the memory holds if a block has all layers that keep tokens.
    """
    kinds = model.cache_groups(args.block_size)
    live = [LIVE_STATES if kind.is_state else scheduler.max_live_tokens(kind.window) for kind in kinds]
    needed = [max_blocks_of_group(scheduler.max_model_len, 1, 1, args.block_size, each) for each in live]
    if len(kinds) > 1:
        needed = [2 * each if kind.is_state else each for kind, each in zip(kinds, needed, strict=True)]
    bytes_of_one = sum(each * int(kind.num_bytes) for kind, each in zip(kinds, needed, strict=True))
    num_bytes = num_blocks * int(args.block_size * model.kv_bytes_per_token)
    host_bytes = int(args.swap_space * _GIB)
    return tuple(
        GroupLimits(
            num_blocks=max(1, num_bytes * each // bytes_of_one),
            num_host_blocks=host_bytes * each // bytes_of_one,
            block_bytes=int(kind.num_bytes),
            window=kind.window,
            max_live_tokens=most,
            is_state=kind.is_state,
        )
        for kind, each, most in zip(kinds, needed, live, strict=True)
    )
