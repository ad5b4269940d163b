"""The memory plan: arithmetic on sizes that are known before a weight is read. Nothing is measured by trying."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from octavo.config.explain import MemoryPlan, render_bytes
from octavo.config.schema import CacheConfig, SchedulerConfig
from octavo.core.arithmetic import num_blocks_for
from octavo.core.model_shape import ModelShape
from octavo.devices.cpu.recorded_model import MAX_RECORDINGS, MAX_ROWS
from octavo.devices.device import Device
from octavo.errors import ConfigError
from octavo.models.loader import LoadedModel
from octavo.ops.registry import Ops
from octavo.sampling.chunks import rows_per_chunk
from octavo.worker.cache_plan import CacheDivision
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
    layer_block_bytes = math.prod(one_block) * attention.element_type.itemsize
    limit = int(memory.available * cache.gpu_memory_utilization)
    limit_because = f"gpu_memory_utilization {cache.gpu_memory_utilization:g} of what the {memory.source} has available"
    division = CacheDivision(shape.cache_groups, layer_block_bytes, cache, scheduler)
    fitting = division.most_tokens(limit - sizes.weights_bytes, memory.most_kv_bytes)
    if not user_set_max_model_len and fitting is not None and fitting < scheduler.max_model_len:
        scheduler = replace(scheduler, max_model_len=fitting)
        division = CacheDivision(shape.cache_groups, layer_block_bytes, cache, scheduler)
    sizes = sizes.with_tables(longest_sequence(scheduler.max_model_len, scheduler))
    activations = activation_bytes(sizes, attention, device, scheduler, cache.block_size)
    left = limit - sizes.weights_bytes - activations
    most = division.most_blocks(left)
    if most < 1:
        raise ConfigError(
            f"out of memory before the first KV block: weights {render_bytes(sizes.weights_bytes)} and the activations "
            f"of one step {render_bytes(activations)} leave too little of {render_bytes(limit)} ({limit_because}); "
            "lower max_num_batched_tokens or max_num_seqs, choose a smaller model or dtype, or free memory"
        )
    num_blocks, because = division.choose(most, memory)
    if user_set_max_model_len:
        division.check_holds_one(num_blocks, because)
    kv_bytes = division.num_bytes(num_blocks)
    swap_bytes = cache.swap_space_bytes
    if memory.is_host:
        swap_bytes = min(swap_bytes, left - kv_bytes)
    host_blocks = max(0, division.most_blocks(swap_bytes))
    return MemoryPlan(
        device=device.name,
        total_memory=memory.total,
        available_memory=memory.available,
        limit=limit,
        limit_because=limit_because,
        weights_bytes=sizes.weights_bytes,
        activation_bytes=activations,
        cache=division.limits(num_blocks, host_blocks),
        num_blocks_because=because,
        kv_bytes=kv_bytes,
        host_bytes=division.num_bytes(host_blocks),
        max_model_len=scheduler.max_model_len,
    )


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
    kept = _batch_bytes(num_tokens, num_rows, scheduler, block_size, len(shape.cache_groups)) + _recordings_bytes(
        shape, element, num_rows
    )
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


def _batch_bytes(num_tokens: int, num_rows: int, scheduler: SchedulerConfig, block_size: int, num_groups: int) -> int:
    """Token ids, positions and slots with the arrays that they are made from, and the gathered block tables."""
    width = num_groups * num_blocks_for(scheduler.max_model_len, block_size)
    return (72 + 8 * num_groups) * num_tokens + 64 * num_rows + 4 * num_rows * width
