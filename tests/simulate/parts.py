"""Small settings and cost models."""

from __future__ import annotations

from octavo.config.schema import CacheConfig, PreemptionMode, SchedulerConfig
from octavo.core.cache_limits import CacheLimits
from octavo.scheduler.build import SchedulerSettings
from octavo.simulate.cost_model import Fitted


def make_settings(
    *,
    num_blocks: int = 64,
    num_host_blocks: int = 0,
    max_num_seqs: int = 8,
    max_num_batched_tokens: int = 16,
    depth: int = 1,
    preemption_mode: PreemptionMode = "recompute",
    sliding_window: int | None = None,
    block_bytes: int = 1 << 20,
) -> SchedulerSettings:
    scheduler = SchedulerConfig(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        target_step_ms=0.0,
        max_model_len=256,
        max_steps_in_flight=depth,
        preemption_mode=preemption_mode,
    )
    return SchedulerSettings(
        cache=CacheConfig(dtype="float32", block_size=4, watermark=0.0),
        scheduler=scheduler,
        limits=CacheLimits.of_one_group(
            num_blocks,
            4,
            num_host_blocks=num_host_blocks,
            block_bytes=block_bytes,
            window=sliding_window,
            max_live_tokens=scheduler.max_live_tokens(sliding_window),
        ),
    )


def make_costs(
    *,
    step_s: float = 1.0,
    sequence_s: float = 0.0,
    prefill_token_s: float = 0.0,
    kv_bytes_per_token: float = 8.0,
    sliding_window: int | None = None,
) -> Fitted:
    """By default every step takes a second."""
    return Fitted(
        name="test",
        step_s=step_s,
        sequence_s=sequence_s,
        prefill_token_s=prefill_token_s,
        context_token_s=0.0,
        pair_s=0.0,
        kv_bytes_per_token=kv_bytes_per_token,
        num_kv_tokens=256,
        sliding_window=sliding_window,
    )
