"""The memory plan: arithmetic on sizes that are known before a weight is read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from octavo.attention.backend import AttentionBackend, cache_layout
from octavo.config.explain import MemoryPlan, render_bytes
from octavo.config.schema import CacheConfig, SchedulerConfig
from octavo.core.model_shape import ModelShape
from octavo.devices.device import Device, DeviceMemory
from octavo.errors import ConfigError
from octavo.models.loader import LoadedModel
from octavo.worker.prompt_encodings import kept_encodings_bytes
from octavo.worker.start.activations import Activations
from octavo.worker.start.cache_plan import CacheDivision


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """The sizes of one rank's part of a model on its device, for the memory plan."""

    shape: ModelShape
    weights_bytes: int
    position_bytes: int
    """Bytes per position of the tables that have a row for each position."""
    layer_block_bytes: tuple[int, ...]
    """Bytes of a block in one layer, for each cache group."""
    activation_bytes: Callable[[int], int]
    """Returns the most bytes of a step beside weights and KV cache, for sequences of at most so many tokens."""
    encodings_bytes: int = 0
    """Bytes of kept encodings of images and sounds."""
    activations_because: str = "peak of the fullest step"

    @classmethod
    def of(
        cls,
        opened: LoadedModel,
        device: Device,
        attention: AttentionBackend,
        scheduler: SchedulerConfig,
        block_size: int,
        *,
        has_steps: bool = True,
    ) -> ModelSizes:
        """Return the sizes of an opened model on its device. has_steps: whether to find the memory of steps; else it is
        0."""
        shape = opened.shape
        activations = Activations(opened, device, attention, scheduler) if has_steps else None
        return cls(
            shape,
            opened.model.planned_bytes(device.ops),
            opened.position_bytes(),
            tuple(cache_layout(attention, each.keeps, 1, block_size).num_bytes for each in shape.cache_groups),
            lambda max_model_len: 0 if activations is None else activations.num_bytes(max_model_len, block_size),
            kept_encodings_bytes(opened.model, scheduler.max_num_batched_tokens, opened.dtype.itemsize),
        )

    def with_tables(self, num_positions: int) -> ModelSizes:
        """Return these sizes with the tables of `num_positions` positions counted as weights."""
        tables = self.position_bytes * min(num_positions, self.shape.max_position_embeddings)
        return replace(self, weights_bytes=self.weights_bytes + tables)


def longest_sequence(max_model_len: int, scheduler: SchedulerConfig) -> int:
    """Return the most positions that a sequence of a step may have: a dummy one may fill the step."""
    return max(max_model_len, scheduler.max_num_batched_tokens)


@contextmanager
def refusing_too_little(purpose: str, weights_bytes: int, kv_bytes: int) -> Iterator[None]:
    """Raise ConfigError, by number, where a device runs out of memory beside weights and KV caches."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            f"out of memory {purpose}, beside weights of {render_bytes(weights_bytes)} and KV caches of "
            f"{render_bytes(kv_bytes)}: lower gpu_memory_utilization, max_num_batched_tokens, max_num_seqs or "
            f"max_model_len, or choose a smaller model; PyTorch says: {'. '.join(str(error).split('. ')[:2])}"
        ) from error


def _check_weights_fit(weights_bytes: int, limit: int, limit_because: str) -> None:
    """Raise ConfigError where the weights alone take more than `limit` bytes."""
    if weights_bytes >= limit:
        raise ConfigError(
            f"the weights take {render_bytes(weights_bytes)}, more than {render_bytes(limit)} ({limit_because}); "
            "choose a smaller model, quantise the weights (quantization int8 or int4), divide them over ranks "
            "(tensor_parallel_size), or free memory"
        )


def divide_memory(
    sizes: ModelSizes,
    memory: DeviceMemory,
    *,
    cache: CacheConfig,
    scheduler: SchedulerConfig,
    device: str,
    user_set_max_model_len: bool = False,
    kept_bytes: int = 0,
) -> MemoryPlan:
    """Divide what `memory`, the share of one rank, has available.

    kept_bytes: this rank's share of the host's memory that keeps KV blocks outside the cache, and has not got it yet.
    Raises ConfigError, with a remedy, when it is too little.
    """
    shape, layer_block_bytes = sizes.shape, sizes.layer_block_bytes
    limit = int(memory.available * cache.gpu_memory_utilization)
    limit_because = f"gpu_memory_utilization {cache.gpu_memory_utilization:g} of what the {memory.source} has available"
    if not memory.is_host and (cache.num_gpu_blocks_override or cache.kv_cache_memory):
        limit, limit_because = memory.available, f"what the {memory.source} has available: the KV cache is given"
    if memory.is_host and kept_bytes:
        limit = max(0, limit - kept_bytes)
        limit_because += f", less {render_bytes(kept_bytes)} of kv_host_size"
    division = CacheDivision(shape.cache_groups, layer_block_bytes, cache, scheduler)
    fitting = division.most_tokens(limit - sizes.weights_bytes, memory.most_kv_bytes)
    if not user_set_max_model_len and fitting is not None and fitting < scheduler.max_model_len:
        scheduler = replace(scheduler, max_model_len=fitting)
        division = CacheDivision(shape.cache_groups, layer_block_bytes, cache, scheduler)
    sizes = sizes.with_tables(longest_sequence(scheduler.max_model_len, scheduler))
    activations = sizes.activation_bytes(scheduler.max_model_len)
    left = limit - sizes.weights_bytes - activations - sizes.encodings_bytes
    most = division.most_blocks(left)
    _check_weights_fit(sizes.weights_bytes, limit, limit_because)
    if most < 1:
        raise ConfigError(
            f"out of memory before the first KV block: weights {render_bytes(sizes.weights_bytes)} and the activations "
            f"of one step {render_bytes(activations)} ({sizes.activations_because}) leave too little of "
            f"{render_bytes(limit)} ({limit_because}); "
            "lower max_num_batched_tokens or max_num_seqs, choose a smaller model or dtype, or free memory"
        )
    num_blocks, because = division.choose(most, memory)
    if user_set_max_model_len:
        division.check_holds_one(num_blocks, because)
    kv_bytes = division.num_bytes(num_blocks)
    swap_bytes = min(cache.swap_space_bytes, left - kv_bytes) if memory.is_host else cache.swap_space_bytes
    host_blocks = max(0, division.most_blocks(swap_bytes))
    pinned_bytes = division.num_bytes(host_blocks)
    if memory.host_available is not None and pinned_bytes > memory.host_available:
        raise ConfigError(
            f"swap_space of {render_bytes(pinned_bytes)} has to be pinned in the memory of the host, and this rank's "
            f"share of what that has available is {render_bytes(memory.host_available)}; lower swap_space"
        )
    return MemoryPlan(
        device=device,
        total_memory=memory.total,
        available_memory=memory.available,
        limit=limit,
        limit_because=limit_because,
        weights_bytes=sizes.weights_bytes,
        activation_bytes=activations,
        activations_because=sizes.activations_because,
        encodings_bytes=sizes.encodings_bytes,
        cache=division.limits(num_blocks, host_blocks),
        cache_groups=shape.cache_groups,
        num_blocks_because=because,
        kv_bytes=kv_bytes,
        host_bytes=pinned_bytes,
        max_model_len=scheduler.max_model_len,
    )
