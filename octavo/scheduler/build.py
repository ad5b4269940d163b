"""A scheduler from its configuration: the engine, a replay and a simulation all build theirs here."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from octavo.config.schema import CacheConfig, SchedulerConfig
from octavo.core.cache_limits import CacheLimits
from octavo.kv_cache.block_manager import BlockManager
from octavo.kv_transfer.connector import Connector
from octavo.scheduler.adapters import AdapterCalls
from octavo.scheduler.drafts import Proposer
from octavo.scheduler.policies import make_policy
from octavo.scheduler.rates import PreemptionCosts, Rates
from octavo.scheduler.scheduler import Scheduler


class SchedulerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that a scheduler's decisions depend on besides requests, results and the time.

    sends_tokens: some workers do not draw, so that steps carry the tokens which were drawn.
    """

    cache: CacheConfig
    scheduler: SchedulerConfig
    limits: CacheLimits
    preemption_costs: PreemptionCosts = PreemptionCosts()
    sends_tokens: bool = False


def build_scheduler(
    settings: SchedulerSettings,
    proposer: Proposer | None = None,
    connect: Callable[[BlockManager, Callable[[], float | None]], Connector | None] | None = None,
    adapter_calls: AdapterCalls | None = None,
) -> Scheduler:
    """Build a scheduler and its block manager, without requests.

    proposer: guesses tokens that steps verify. connect: returns what has prefixes that these blocks do not have,
    given what returns the measured prompt tokens per second. adapter_calls: reach the ranks that read adapters.
    """
    cache, scheduler = settings.cache, settings.scheduler
    block_manager = BlockManager(
        settings.limits,
        watermark=cache.watermark,
        enable_prefix_caching=cache.enable_prefix_caching,
        eviction=cache.prefix_cache_eviction,
        max_cached_bytes=cache.prefix_cache_size,
        snapshot_tokens=cache.state_snapshot_tokens,
    )
    rates = Rates(
        settings.preemption_costs, scheduler.prefill_tokens_per_s, scheduler.swap_bytes_per_s, scheduler.target_step_s
    )
    return Scheduler(
        block_manager,
        scheduler,
        make_policy(scheduler, block_manager, rates),
        rates,
        sends_tokens=settings.sends_tokens,
        proposer=proposer,
        connector=None if connect is None else connect(block_manager, lambda: rates.known_prefill_tokens_per_s),
        adapter_calls=adapter_calls,
    )
