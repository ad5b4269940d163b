"""GLM-5.3-Flash: hyper-connections, Kimi's delta attention, and attention over latents of windows that queries choose.

It has no rotary embedding. Source: Z.ai's releases.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import torch
from torch import Tensor, nn

from octavo.attention.metadata import ModelInput
from octavo.config.checkpoint import Checkpoint
from octavo.config.section import MOST_LAYERS, Section
from octavo.core.model_shape import IndexedLatent, LayerCache
from octavo.distributed.mesh import Mesh
from octavo.layers.chosen import ChosenAttention
from octavo.layers.compressed import Compression, FloatTable, OpenWindows, PoolChoice, PoolKeys
from octavo.layers.hyper import MeanOfStreams
from octavo.layers.linear import ColumnLinear
from octavo.layers.norm import LayerNorm
from octavo.layers.routers import ExactLinear
from octavo.models.hybrid import (
    ATTENTION,
    RECURRENT,
    HybridConfig,
    kimi_delta,
    read_bound,
    read_kimi_sizes,
    stored_convolutions,
)
from octavo.models.latent import LatentBlock, LatentConfig
from octavo.models.sparse import corrected, sparse_by_kind
from octavo.models.streams import HyperLayer, StreamsConfig, StreamsDecoder, read_streams
from octavo.ops.compressed import SmallQueries

_KEY_EPS: Final = 1e-6
"""The eps of the norm of small keys."""
_KINDS: Final = {"linear_attention": RECURRENT, "indexed_attention": ATTENTION, "full_attention": ATTENTION}


@dataclass(frozen=True, kw_only=True)
class Glm5NextConfig(HybridConfig, LatentConfig, StreamsConfig):
    """Layers with a state, and attention over latents in the others."""

    choice: PoolChoice

    def caches_of(self, layer: int, mesh: Mesh) -> Sequence[LayerCache]:
        if self.kinds[layer] == RECURRENT:
            return super().caches_of(layer, mesh)
        size, by = self.latent_heads.latent, self.choice
        latents = IndexedLatent(size, size, 0, by.num_tokens)
        return (LayerCache(latents), *Compression(by.rate, by.size).caches())


class PoolIndexer(nn.Module):
    """Makes small keys of windows, and queries that choose among them. Every rank has all of it."""

    def __init__(self, c: Glm5NextConfig) -> None:
        super().__init__()
        assert c.q_rank is not None
        by, single = c.choice, Mesh.single()
        self._sizes = by.count, by.size
        self.wq_b = ColumnLinear(c.q_rank, by.count * by.size, single)
        self.keys = ColumnLinear(c.hidden_size, [by.size] * 2, single, reads=["wk", "index_kpool_compress_gate"])
        self.k_norm = LayerNorm(by.size, _KEY_EPS)
        self.index_kpool_compress_ape = FloatTable(by.rate, by.size)
        self.weights_proj = ExactLinear(c.hidden_size, by.count)
        self.windows = OpenWindows(Compression(by.rate, by.size))
        self.pools = PoolKeys(by.rate, by.num_chosen, by.num_tokens)

    def forward(self, x: Tensor, inputs: Tensor, batch: ModelInput) -> Tensor:
        """Return which tokens queries attend to, as of `choose_pools`; x [tokens, hidden], inputs [tokens, q_rank]."""
        count, size = self._sizes
        keys, gates = self.keys(x).chunk(2, 1)
        parts = torch.cat((self.k_norm(keys.contiguous()), gates), 1)
        ends, (made,) = self.windows.ended(parts, [self.index_kpool_compress_ape.weight], batch)
        if len(ends.positions):
            self.pools.store(made, batch, ends)
        weights = self.weights_proj(x) * float((count * size) ** -0.5)
        return self.pools.choose(SmallQueries(self.wq_b(inputs).view(len(x), count, size), weights), batch)


class PoolBlock(LatentBlock):
    """Attention over latents of the tokens in chosen windows, and of those behind the last window."""

    attend: ChosenAttention  # type: ignore[assignment]

    def __init__(self, c: Glm5NextConfig, mesh: Mesh, layer: int) -> None:
        super().__init__(c, mesh, layer)
        assert c.attention_scale is not None
        self.attend = ChosenAttention(c.attention_scale, c.choice.num_tokens)
        self.indexer = PoolIndexer(c)

    def prepare_choice(self, x: Tensor, inputs: Tensor, batch: ModelInput) -> None:
        self.attend.take(self.indexer(x, inputs, batch), batch)


class Glm5NextForConditionalGeneration(StreamsDecoder):
    """The text model."""

    HEAD = MeanOfStreams
    REPLACED = {".hc_attn_": ".attn_hc.", ".hc_ffn_": ".ffn_hc.", ".self_attn.forget_gate.": ".self_attn."}

    @classmethod
    def read(cls, c: Checkpoint) -> Glm5NextConfig:
        c.expect("index_kpool_always_select_tail", True)
        c.expect("hidden_act", "silu")
        layers, eps = c.positive("num_hidden_layers"), c.positive_float("rms_norm_eps", 1e-5)
        c.expect("num_key_value_heads", c.positive("num_attention_heads"))
        kinds = _read_kinds(c, layers)
        limit = (c.positive_float("swiglu_limit", 10.0),)
        sizes = read_kimi_sizes(c, num_heads=64)
        mixture = corrected(c, groups=(1, 1), factor=2.5)
        c.positive("q_lora_rank")
        return Glm5NextConfig.common_latent(
            c,
            may_turn=False,
            rope=None,
            norm_eps=eps,
            latent_eps=eps,
            windows=(),
            activation="capped_swiglu",
            activation_numbers=limit,
            mixture=replace(mixture, activation="capped_swiglu", numbers=limit),
            sparse=sparse_by_kind(c, 3),
            kinds=kinds,
            sizes=sizes,
            attention=PoolBlock,
            recurrence=kimi_delta(convolutions=stored_convolutions(c, sizes), bound=_read_bound(c)),
            layer=HyperLayer,
            streams=read_streams(c, eps),
            choice=_read_choice(c),
        )

    def own_name(self, name: str) -> str:
        name = super().own_name(name)
        return f"{name}.weight" if name.endswith(".index_kpool_compress_gate") else name


Glm5NextForCausalLM = Glm5NextForConditionalGeneration


def _read_kinds(c: Checkpoint, layers: int) -> tuple[str, ...]:
    kinds = ["linear_attention" if layer % 4 != 3 else "indexed_attention" for layer in range(min(layers, MOST_LAYERS))]
    if c.values.get("layer_types") is not None:
        expected = f'"linear_attention" or "indexed_attention" for each of {layers} layers'
        kinds = c.listed("layer_types", layers, lambda each: isinstance(each, str) and each in _KINDS, expected)
    if c.values.get("indexer_types") is not None:
        # those of layers with a state mean nothing
        needed = [_KINDS[kind] == ATTENTION for kind in kinds]
        expected = f'"full" for each of {layers} layers, in which each layer that attends chooses for itself'
        found = c.listed("indexer_types", layers, lambda each: each in ("full", "shared"), expected)
        if any(kind == "shared" for kind, attends in zip(found, needed, strict=True) if attends):
            raise c.error("indexer_types", expected)
    return tuple(_KINDS[kind] for kind in kinds)


def _read_bound(c: Checkpoint) -> float:
    """Return the bound of decays, which a release has in the section of the layers with a state."""
    section = c.section("linear_attn_config")
    where: Section = c
    name = "linear_lower_bound"
    if section is not None and section.values.get("gate_lower_bound") is not None:
        where, name = section, "gate_lower_bound"
    return read_bound(where, name)


def _read_choice(c: Checkpoint) -> PoolChoice:
    rate, tokens = c.positive("index_kpool", 16), c.positive("index_topk", 2048)
    if tokens % rate:
        raise c.error("index_topk", f"a multiple of index_kpool, which is {rate}")
    return PoolChoice(rate, tokens // rate, c.positive("index_n_heads", 32), c.positive("index_head_dim", 128))
