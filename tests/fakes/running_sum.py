"""A family of which some layers keep a state: a running sum instead of attention, or beside it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from octavo.attention.metadata import ModelInput
from octavo.config.checkpoint import Checkpoint
from octavo.core.model_shape import LayerCache, State
from octavo.distributed.mesh import Mesh
from octavo.layers.elementwise import addition
from octavo.layers.heads import Heads
from octavo.layers.layer import Binding, CachedLayer
from octavo.models import loader
from octavo.models.blocks import GatedDecoder, RotaryAttention
from octavo.models.config import DecoderConfig
from octavo.models.llama import LlamaForCausalLM
from octavo.models.registry import ModelClass, resolve_model
from tests.fakes.checkpoints import edit_config, make_checkpoint

ARCHITECTURE = "RunningSumForCausalLM"
RUNNING_SUM = "running sum"
"""Its name among families."""
KINDS = ("attention", "sum", "both")
"""Of the layers, in turn."""


class RunningSum(CachedLayer):
    """The state of a head is the sum of its values so far, each one counted half after the next."""

    def __init__(self, heads: Heads) -> None:
        super().__init__()
        self.heads = heads

    def bind(self, binding: Binding) -> None:
        """There is no operator: plain torch computes, which is not recorded."""

    def forward(self, q: Tensor, v: Tensor, batch: ModelInput) -> Tensor:
        """q [tokens, heads, dim], v [tokens, kv_heads, dim] → the queries times the sums, [tokens, heads · dim]."""
        states, metadata = batch.kv_caches[self.cache_index][0], batch.attention[self.cache_group]
        out, size, token = torch.empty_like(q), metadata.block_size, 0
        if q.is_meta:
            return out.flatten(1)
        tables = metadata.block_tables.tolist()
        for table, length, count in zip(tables, metadata.lengths, metadata.query_lengths, strict=True):
            start = length - count
            total = states[table[(start - 1) // size]] if start else torch.zeros_like(states[0])
            for position in range(start, length):
                total = 0.5 * total + v[token].flatten().float()
                block = table[position // size]
                if block and (position + 1 == length or (position + 1) % size == 0):
                    states[block] = total
                heads = total.view(self.heads.kv, self.heads.dim)
                out[token] = q[token] * heads.repeat_interleave(self.heads.query // self.heads.kv, 0).to(q.dtype)
                token += 1
        return out.flatten(1)


class Convolution(CachedLayer):
    """The state is the last two values of each channel: the compiled operator of short convolutions, which is recorded.

    There are as many heads of values as of queries, whose values have no part.
    """

    def __init__(self, heads: Heads) -> None:
        super().__init__()
        self._weights: dict[torch.device, Tensor] = {}

    def forward(self, q: Tensor, v: Tensor, batch: ModelInput) -> Tensor:
        """v [tokens, heads, dim] → [tokens, heads · dim]."""
        states, metadata = batch.kv_caches[self.cache_index][0], batch.attention[self.cache_group]
        x = v.flatten(1)
        if x.device not in self._weights:
            self._weights[x.device] = torch.full((3, x.shape[1]), 0.5, dtype=x.dtype, device=x.device)
        out: Tensor = self.ops.short_convolution(x, self._weights[x.device], None, states, metadata)
        return out


class SummingAttention(RotaryAttention):
    """Attention, a running sum, or the sum of both."""

    def __init__(self, c: RunningSumConfig, mesh: Mesh, layer: int) -> None:
        super().__init__(c, mesh, layer)
        kind = KINDS[layer % 3]
        if kind == "sum":
            del self.attend
        self.sum = None if kind == "attention" else c.state_layer(self.qkv_proj.local_heads)
        self.add = addition()

    def forward(self, x: Tensor, batch: ModelInput) -> Tensor:
        q, k, v = self.qkv_proj(x)
        assert self.rope is not None
        q, k = self.rope(q, k, batch)
        parts = [self.attend(q, k, v, batch)] if hasattr(self, "attend") else []
        parts += [self.sum(q, v, batch)] if self.sum is not None else []
        out: Tensor = self.o_proj(parts[0] if len(parts) == 1 else self.add(*parts))
        return out


class RunningSumConfig(DecoderConfig):
    """That of Llama."""

    state_layer: Callable[[Heads], CachedLayer] = RunningSum
    values_per_element = 1
    """Elements of a state for each one of a token's values."""

    def caches_of(self, layer: int, mesh: Mesh) -> Sequence[LayerCache]:
        heads, kind = self.heads.share(mesh), KINDS[layer % 3]
        state = [] if kind == "attention" else [LayerCache(State(heads.kv_size * self.values_per_element))]
        return [*(() if kind == "sum" else super().caches_of(layer, mesh)), *state]


class RunningSumForCausalLM(GatedDecoder):
    """The whole model."""

    Config = RunningSumConfig

    @classmethod
    def read(cls, c: Checkpoint) -> RunningSumConfig:
        return cls.Config(**vars(LlamaForCausalLM.read(c)))

    def __init__(self, c: RunningSumConfig, mesh: Mesh) -> None:
        super().__init__(c, mesh, lambda layer: SummingAttention(c, mesh, layer))


class ConvolutionConfig(RunningSumConfig):
    """With the compiled operator."""

    state_layer = Convolution
    values_per_element = 2


class ConvolutionForCausalLM(RunningSumForCausalLM):
    """The whole model."""

    Config = ConvolutionConfig


def make_running_sum(
    path: Path, monkeypatch: pytest.MonkeyPatch, *, is_compiled: bool = False, **overrides: Any
) -> Path:
    """Write a random model of the family, which the loader knows from now on in this process.

    is_compiled: with a short convolution instead of the sum.
    """
    model = ConvolutionForCausalLM if is_compiled else RunningSumForCausalLM

    def resolve(checkpoint: Checkpoint, **how: bool) -> ModelClass:
        return model if checkpoint.architecture == ARCHITECTURE else resolve_model(checkpoint, **how)

    monkeypatch.setattr(loader, "resolve_model", resolve)
    make_checkpoint("llama", path, num_hidden_layers=3, **overrides)
    edit_config(path, architectures=[ARCHITECTURE])
    return path
