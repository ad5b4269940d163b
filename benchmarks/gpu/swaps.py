"""Swaps between the GPU and the host: the same blocks come back, and bytes per second."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import torch

from octavo.attention.backend import CacheLayout
from octavo.config.schema import DeviceConfig
from octavo.core.step import BlockCopy, BlockOps
from octavo.devices.device import open_device
from octavo.platform import Platform
from octavo.worker.cache_engine import Arena, CacheEngine

BLOCKS, LAYERS = 256, 36


def swaps() -> Iterator[dict[str, Any]]:
    """Yield whether blocks of Qwen3-8B are the same after a way out and back while others write over them, and the
    rates of both ways."""
    device = open_device(DeviceConfig(device="cuda", threads=1), Platform.detect())
    layout = CacheLayout((2, BLOCKS + 1, 8, 16, 128), torch.bfloat16)
    engine = CacheEngine([Arena(range(LAYERS), layout, BLOCKS)], device)
    for cache in engine.caches:
        cache.normal_()
    before = [cache.clone() for cache in engine.caches]
    copies = [BlockCopy(number, number) for number in range(1, BLOCKS + 1)]
    num_bytes = BLOCKS * sum(cache[:, 0].numel() * cache.element_size() for cache in engine.caches)
    for turn in ("first", "again"):
        taken = {}
        for way, ops in (("out", BlockOps(swap_outs=copies)), ("in", BlockOps(swap_ins=copies))):
            torch.cuda.synchronize()
            begun = time.perf_counter()
            engine.apply(ops)
            launched = time.perf_counter() - begun
            if way == "out":
                for cache in engine.caches:
                    cache.zero_()
            torch.cuda.synchronize()
            taken[way] = {"host_s": launched, "bytes_per_s": num_bytes / (time.perf_counter() - begun)}
        # block 0 is none
        pairs = zip(engine.caches, before, strict=True)
        same = all(torch.equal(one[:, 1:], other[:, 1:]) for one, other in pairs)
        yield {"swaps": turn, **taken, "same_blocks": same}
