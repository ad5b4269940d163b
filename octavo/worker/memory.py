"""The memory plan: arithmetic on sizes that are known before a weight is read. Nothing is measured by trying."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from octavo.config.explain import MemoryPlan, render_bytes
from octavo.config.schema import CacheConfig, SchedulerConfig
from octavo.core.arithmetic import max_blocks_of_group, num_blocks_for
from octavo.core.cache_limits import CacheLimits
from octavo.core.model_shape import ModelShape
from octavo.devices.cpu.recorded_model import MAX_RECORDINGS, MAX_ROWS
from octavo.devices.device import Device, DeviceMemory
from octavo.errors import ConfigError
from octavo.models.loader import LoadedModel
from octavo.ops.registry import Ops
from octavo.sampling.chunks import rows_per_chunk
from octavo.worker.drawing import LOGITS_BYTES


class Workspace(Protocol):
    """The part of an attention backend that the plan asks."""

    element_type: torch.dtype

    def cache_shape(self, num_blocks: int, block_size: int, kv_heads: int, head_dim: int) -> tuple[int, ...]:
        """Shape of one layer's cache, of `element_type`."""
        ...

    def workspace_bytes(
        self, max_tokens: int, max_length: int, num_heads: int, kv_heads: int, head_dim: int, element_size: int
    ) -> int:
        """Most bytes that attention allocates beside its answer."""
        ...


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """What the plan needs to know of a model in the type that it will run in."""

    shape: ModelShape
    weights_bytes: int
    element_size: int
    """Bytes of one activation."""
    position_bytes: int = 0
    """Bytes of the tables that have a row for each position, per position."""

    @classmethod
    def of(cls, opened: LoadedModel, ops: Ops) -> ModelSizes:
        """Ask a model that is opened."""
        return cls(opened.shape, opened.model.planned_bytes(ops), opened.dtype.itemsize, opened.position_bytes())

    def with_tables(self, num_positions: int) -> ModelSizes:
        """Return these sizes with the tables of `num_positions` positions counted as weights."""
        tables = self.position_bytes * min(num_positions, self.shape.max_position_embeddings)
        return replace(self, weights_bytes=self.weights_bytes + tables)


def longest_sequence(max_model_len: int, scheduler: SchedulerConfig) -> int:
    """Most positions that a sequence of a step may have: a dummy one may fill the step."""
    return max(max_model_len, scheduler.max_num_batched_tokens)


def divide_memory(
    sizes: ModelSizes,
    attention: Workspace,
    device: Device,
    num_ranks: int = 1,
    *,
    cache: CacheConfig,
    scheduler: SchedulerConfig,
    user_set_max_model_len: bool = False,
) -> MemoryPlan:
    """Divide what the device has available, of which each of `num_ranks` has an equal share.

    Raises ConfigError, with a remedy, when it is too little.
    """
    shape = sizes.shape
    memory = device.memory().share(num_ranks)
    one_block = attention.cache_shape(1, cache.block_size, shape.num_kv_heads, shape.head_dim)
    per_block = shape.num_layers * math.prod(one_block) * attention.element_type.itemsize
    limit = int(memory.available * cache.gpu_memory_utilization)
    limit_because = f"gpu_memory_utilization {cache.gpu_memory_utilization:g} of what the {memory.source} has available"
    if not user_set_max_model_len and shape.sliding_window is None:
        fitting = _most_tokens(limit - sizes.weights_bytes, per_block, cache, memory)
        scheduler = replace(scheduler, max_model_len=min(scheduler.max_model_len, fitting))
    sizes = sizes.with_tables(longest_sequence(scheduler.max_model_len, scheduler))
    activations = activation_bytes(sizes, attention, device, scheduler, cache.block_size)
    left = limit - sizes.weights_bytes - activations
    # one block more than the usable ones: the null block
    most = left // per_block - 1
    if most < 1:
        raise ConfigError(
            f"out of memory before the first KV block: weights {render_bytes(sizes.weights_bytes)} and the activations "
            f"of one step {render_bytes(activations)} leave too little of {render_bytes(limit)} ({limit_because}); "
            "lower max_num_batched_tokens or max_num_seqs, choose a smaller model or dtype, or free memory"
        )
    max_live_tokens = scheduler.max_live_tokens(shape.sliding_window)
    needed = max_blocks_of_group(scheduler.max_model_len, 1, 1, cache.block_size, max_live_tokens)
    # what a sequence lets go of is worth keeping where others may find it
    filled = num_blocks_for(scheduler.max_model_len, cache.block_size) if cache.enable_prefix_caching else needed
    num_blocks, because = _num_blocks(most, per_block, cache, scheduler, filled, memory)
    if num_blocks < needed and user_set_max_model_len:
        shorter_steps = "" if max_live_tokens is None else "lower max_num_batched_tokens, "
        raise ConfigError(
            f"max_model_len {scheduler.max_model_len:,} needs {needed:,} KV blocks of {cache.block_size} tokens "
            f"({render_bytes(needed * per_block)}), there are {num_blocks:,} ({because}); "
            f"lower max_model_len to {num_blocks * cache.block_size:,}, {shorter_steps}or give the cache more memory"
        )
    kv_bytes = (num_blocks + 1) * per_block
    swap_bytes = cache.swap_space_bytes
    if memory.is_host:
        swap_bytes = min(swap_bytes, left - kv_bytes)
    host_blocks = max(0, swap_bytes // per_block - 1)
    return MemoryPlan(
        device=device.name,
        total_memory=memory.total,
        available_memory=memory.available,
        limit=limit,
        limit_because=limit_because,
        weights_bytes=sizes.weights_bytes,
        activation_bytes=activations,
        cache=CacheLimits.of_one_group(
            num_blocks,
            cache.block_size,
            num_host_blocks=host_blocks,
            block_bytes=per_block,
            window=shape.sliding_window,
            max_live_tokens=max_live_tokens,
            num_lookahead=scheduler.num_lookahead_slots,
        ),
        num_blocks_because=because,
        kv_bytes=kv_bytes,
        host_bytes=(host_blocks + 1) * per_block if host_blocks else 0,
        max_model_len=scheduler.max_model_len,
    )


def _most_tokens(left: int, per_block: int, cache: CacheConfig, memory: DeviceMemory) -> int:
    """More tokens than this do not fit the KV cache, whatever else takes memory: tables need not be longer."""
    kv_bytes = min(left, cache.kv_cache_memory or memory.most_kv_bytes or left)
    blocks = cache.num_gpu_blocks_override or kv_bytes // per_block
    return max(1, blocks) * cache.block_size


def _num_blocks(
    most: int, per_block: int, cache: CacheConfig, scheduler: SchedulerConfig, blocks_each: int, memory: DeviceMemory
) -> tuple[int, str]:
    """Usable blocks and the reason for their number, where at most `most` fit the memory and a sequence of full length
    fills `blocks_each`."""
    wanted = cache.num_gpu_blocks_override
    if wanted is not None:
        if wanted > most:
            raise ConfigError(
                f"num_gpu_blocks_override {wanted:,} needs {render_bytes((wanted + 1) * per_block)}, but there is room "
                f"for {most:,} blocks ({render_bytes((most + 1) * per_block)}); lower it, or leave it out"
            )
        return wanted, "num_gpu_blocks_override"
    if cache.kv_cache_memory is not None:
        wanted = cache.kv_cache_memory // per_block - 1
        if wanted < 1:
            raise ConfigError(
                f"kv_cache_memory {render_bytes(cache.kv_cache_memory)} holds no KV block beside the null block; "
                f"one takes {render_bytes(per_block)}: give at least {render_bytes(2 * per_block)}"
            )
        if wanted > most:
            raise ConfigError(
                f"kv_cache_memory {render_bytes(cache.kv_cache_memory)} is more than the "
                f"{render_bytes((most + 1) * per_block)} that weights and activations leave; lower it, or leave it out"
            )
        return wanted, "kv_cache_memory"
    choices = [
        (most, "memory left"),
        (
            scheduler.max_num_seqs * blocks_each,
            f"room for max_num_seqs = {scheduler.max_num_seqs:,} sequences of full length",
        ),
    ]
    if memory.most_kv_bytes is not None:
        choices.append(
            (memory.most_kv_bytes // per_block - 1, f"at most {render_bytes(memory.most_kv_bytes)} on a CPU")
        )
    return min(((max(1, blocks), because) for blocks, because in choices), key=lambda choice: choice[0])


def activation_bytes(
    sizes: ModelSizes, attention: Workspace, device: Device, scheduler: SchedulerConfig, block_size: int
) -> int:
    """Most bytes that one step allocates: in the forward pass, or in sampling while the hidden states are there."""
    shape, element = sizes.shape, sizes.element_size
    num_tokens = scheduler.max_num_batched_tokens
    num_rows = min(scheduler.max_num_seqs, num_tokens)
    hidden = num_tokens * shape.hidden_size * element

    logits_rows = min(num_tokens, rows_per_chunk(shape.vocab_size, LOGITS_BYTES))
    # the head answers in the model's type, which is then widened
    logits = logits_rows * shape.vocab_size * (4 if element == 4 else 4 + element)
    sampling = 2 * hidden + logits + device.sampling_bytes(logits_rows, shape.vocab_size)

    workspace = attention.workspace_bytes(
        num_tokens, scheduler.max_model_len, shape.num_heads, shape.num_kv_heads, shape.head_dim, element
    )
    forward = num_tokens * _forward_bytes_per_token(shape, element) + workspace
    kept = _batch_bytes(num_tokens, num_rows, scheduler, block_size) + _recordings_bytes(shape, element, num_rows)
    return max(forward, sampling) + kept


def _forward_bytes_per_token(shape: ModelShape, element: int) -> int:
    """What the plain-torch operators keep of one token at the widest place of a layer."""
    heads = shape.num_heads + 2 * shape.num_kv_heads
    # the residual stream, a norm's input and output, and the float32 copies inside a norm
    stream = shape.hidden_size * (4 * element + 12)
    # projected, rotated, and what is in between in float32, with its products; rows of the rotary table
    attention = heads * shape.head_dim * (2 * element + 16) + shape.head_dim * 8
    # gate and up, silu of gate, their product, and one to spare
    mlp = 5 * shape.intermediate_size * element
    return stream + max(attention, mlp)


def _recordings_bytes(shape: ModelShape, element: int, num_rows: int) -> int:
    """What recorded decode steps keep: the memory they share, in pieces of powers of two, their answers and calls."""
    num_rows = min(num_rows, MAX_ROWS)
    shared = 4 * num_rows * _forward_bytes_per_token(shape, element)
    calls = (shape.num_layers + 1) * 16 * 256
    return shared + MAX_RECORDINGS * (num_rows * shape.hidden_size * element + calls)


def _batch_bytes(num_tokens: int, num_rows: int, scheduler: SchedulerConfig, block_size: int) -> int:
    """Token ids, positions and slots with the arrays that they are made from, and the gathered block tables."""
    width = num_blocks_for(scheduler.max_model_len, block_size)
    return 80 * num_tokens + 64 * num_rows + 4 * num_rows * width
