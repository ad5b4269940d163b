"""The settings of simulated schedulers: engine arguments, on a device that a cost model describes."""

from __future__ import annotations

import dataclasses
from typing import Final

from octavo.config.args import EngineArgs
from octavo.config.resolve import cache_config, scheduler_config
from octavo.core.cache_limits import CacheLimits
from octavo.errors import ConfigError
from octavo.scheduler.build import SchedulerSettings
from octavo.scheduler.rates import PreemptionCosts
from octavo.simulate.cost_model import CostModel

_GIB: Final = 1 << 30


def engine_settings(args: EngineArgs, model: CostModel, *, max_model_len: int) -> SchedulerSettings:
    """Return settings with a cache that the device of the cost model has room for. Raises ConfigError."""
    block_bytes = int(args.block_size * model.kv_bytes_per_token)
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
        limits=CacheLimits.of_one_group(
            num_blocks,
            args.block_size,
            num_host_blocks=int(args.swap_space * _GIB / block_bytes),
            block_bytes=block_bytes,
            window=model.sliding_window,
            max_live_tokens=scheduler.max_live_tokens(model.sliding_window),
            num_lookahead=scheduler.num_lookahead_slots,
        ),
        preemption_costs=PreemptionCosts(
            prefill_tokens_per_s=model.prefill_tokens_per_s, swap_bytes_per_s=model.swap_bytes_per_s
        ),
    )
