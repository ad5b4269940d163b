"""The configuration of one replica: its share of what was given for all of them."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import msgspec

from octavo.config.schema import CacheConfig, EngineConfig, ObservabilityConfig
from octavo.core.messages import CoreReady
from octavo.platform import core_shares


def replica_config(
    config: EngineConfig, number: int, *, before: CoreReady | None = None, num_starts: int = 0
) -> EngineConfig:
    """Return the configuration of replica `number`: an equal share of the memory, and processors of its own. Where
    prefill and decode are apart the first ones have the role of prefill.

    before: what was measured by the core that this one replaces, which gets as many KV blocks, whatever other replicas
    have taken since. num_starts: how often this replica was started before; each start has a recording of its own.
    """
    count, transfer = config.num_engines, config.transfer
    place = config.replicas
    if count > 1:
        if transfer.prefill:
            transfer = dataclasses.replace(transfer, role="prefill" if number < transfer.prefill else "decode")
        name, cpus = f"{transfer.role or 'core'} {number}", tuple(core_shares(count)[number])
        place = dataclasses.replace(place, number=number, cpus=cpus, name=name)
    return msgspec.structs.replace(
        config,
        cache=_share(config.cache, count, before, has_gpus=config.device.has_gpus),
        observability=_with_own_recording(config.observability, number if count > 1 else None, num_starts),
        replicas=place,
        transfer=transfer,
    )


def _share(cache: CacheConfig, count: int, before: CoreReady | None, *, has_gpus: bool) -> CacheConfig:
    """Return a share of what all have together. has_gpus: whether each has the memory of GPUs of its own."""
    if count > 1:
        cache = dataclasses.replace(cache, swap_space=cache.swap_space / count)
    if count > 1 and not has_gpus:
        cache = dataclasses.replace(
            cache,
            gpu_memory_utilization=cache.gpu_memory_utilization / (count if before is None else 1),
            kv_cache_memory=None if cache.kv_cache_memory is None else cache.kv_cache_memory // count,
            prefix_cache_size=None if cache.prefix_cache_size is None else cache.prefix_cache_size // count,
        )
    if before is None:
        return cache
    return dataclasses.replace(cache, num_gpu_blocks_override=max(group.num_blocks for group in before.cache.groups))


def _with_own_recording(observability: ObservabilityConfig, number: int | None, num_starts: int) -> ObservabilityConfig:
    """Return the section with a file that no other core writes to: a restart keeps the recording of the crash."""
    if observability.record_trace is None:
        return observability
    path = Path(observability.record_trace)
    parts = [f"replica{number}"] * (number is not None) + [f"restart{num_starts}"] * (num_starts > 0)
    own = path.with_name("-".join([path.stem, *parts]) + path.suffix)
    return dataclasses.replace(observability, record_trace=str(own) if parts else observability.record_trace)
