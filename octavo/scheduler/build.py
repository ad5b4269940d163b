"""A scheduler from its configuration: the engine, a replay and a simulation put theirs together here, all alike."""

from __future__ import annotations

import msgspec

from octavo.config.schema import CacheConfig, SchedulerConfig
from octavo.kv_cache.block_manager import BlockManager
from octavo.scheduler.policies import make_policy
from octavo.scheduler.rates import PreemptionCosts, Rates
from octavo.scheduler.scheduler import Scheduler


class SchedulerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that a scheduler's decisions depend on besides requests, results and the time it is told.

    num_blocks, num_host_blocks: usable blocks on the device and in the swap space. sliding_window: tokens that a query
    sees in every layer of the model; None where a layer sees all.
    """

    cache: CacheConfig
    scheduler: SchedulerConfig
    num_blocks: int
    num_host_blocks: int = 0
    preemption_costs: PreemptionCosts = PreemptionCosts()
    sliding_window: int | None = None


def build_scheduler(settings: SchedulerSettings) -> Scheduler:
    """A scheduler and its block manager, without requests."""
    cache, scheduler = settings.cache, settings.scheduler
    block_manager = BlockManager(
        settings.num_blocks,
        cache.block_size,
        cache.watermark,
        cache.enable_prefix_caching,
        num_host_blocks=settings.num_host_blocks,
        eviction=cache.prefix_cache_eviction,
        sliding_window=settings.sliding_window,
        max_live_tokens=scheduler.max_live_tokens(settings.sliding_window),
        max_cached_blocks=_max_cached_blocks(settings),
    )
    rates = Rates(
        settings.preemption_costs, scheduler.prefill_tokens_per_s, scheduler.swap_bytes_per_s, scheduler.target_step_s
    )
    return Scheduler(block_manager, scheduler, make_policy(scheduler, block_manager, rates), rates)


def _max_cached_blocks(settings: SchedulerSettings) -> int | None:
    """Cached blocks from which on no fresh ones are taken; None for no such limit."""
    limit, block_bytes = settings.cache.prefix_cache_size, settings.preemption_costs.block_bytes
    return None if limit is None or not block_bytes else limit // block_bytes
