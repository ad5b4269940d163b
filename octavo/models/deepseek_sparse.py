"""DeepSeek V3.2, GLM-5, A.X K2 and Hy4: attention over latents of tokens that an indexer chooses."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from octavo.attention.metadata import ModelInput
from octavo.config.checkpoint import Checkpoint
from octavo.config.section import MOST_LAYERS
from octavo.distributed.mesh import Mesh
from octavo.layers.chosen import ChosenAttention, SinkChosenAttention
from octavo.layers.elementwise import Elementwise
from octavo.layers.hyper import PlainConnection
from octavo.layers.linear import ColumnLinear
from octavo.layers.norm import LayerNorm, Norm, RMSNorm
from octavo.layers.picked import Pick, PickedLinear
from octavo.models.blocks import GatedLayer, SparseMLP
from octavo.models.indexed import (
    IndexedConfig,
    Indexer,
    IndexHeads,
    check_first,
    index_heads,
    read_sources,
    sources_of,
)
from octavo.models.latent import LatentBlock, LatentDecoder
from octavo.models.ropes import read_rope
from octavo.models.sparse import corrected, sparse_by_kind
from octavo.models.streams import HyperLayer, StreamsConfig, StreamsDecoder, read_streams

ConfigOf = TypeVar("ConfigOf", bound=IndexedConfig)


class IndexedBlock(LatentBlock):
    """Attention over latents of chosen tokens."""

    attend: ChosenAttention  # type: ignore[assignment]

    def __init__(self, c: IndexedConfig, mesh: Mesh, layer: int) -> None:
        super().__init__(c, mesh, layer)
        assert c.index is not None
        assert c.attention_scale is not None
        self.indexer = Indexer(c, c.index) if c.source_of(layer) == layer else None
        self.attend = ChosenAttention(c.attention_scale, c.index.num_chosen)

    def prepare_choice(self, x: Tensor, inputs: Tensor, batch: ModelInput) -> None:
        if self.indexer is not None:
            self.attend.choose(self.indexer(x, inputs, batch), batch)


class DeepseekV32ForCausalLM(LatentDecoder):
    """DeepSeek V3.2 and GLM-5: an indexer chooses the `index_topk` tokens that a query attends to.

    Where no context is longer it chooses all of them: then it is not computed, and layers keep latents alone.
    `indexer_types` (or what it follows from) says in which layers of GLM there is none: these attend to the tokens that
    the last one before them chose.
    Sources: https://arxiv.org/abs/2512.02556, https://arxiv.org/abs/2602.15763, https://arxiv.org/abs/2603.12201.
    """

    IGNORED = (*LatentDecoder.IGNORED, r"layers\.\d+\.self_attn\.indexer\..*")

    @classmethod
    def read(cls, c: Checkpoint) -> IndexedConfig:
        is_glm = c.str("model_type") == "glm_moe_dsa"
        unstated = _Unstated(1e-5, (1, 1), 3, 32) if is_glm else _Unstated()
        config = _read_indexed(IndexedConfig, c, unstated, turns_pairs=is_glm)
        return replace(config, sources=read_sources(c, config.num_layers) if is_glm else ())

    def __init__(self, c: IndexedConfig, mesh: Mesh) -> None:
        if c.index is not None:
            check_first(c, mesh)
        super().__init__(c, mesh)


GlmMoeDsaForCausalLM = DeepseekV32ForCausalLM


@dataclass(frozen=True, slots=True)
class _Unstated:
    """The values where a config has none: the eps of norms, groups of experts and those kept, layers without a
    mixture, and small heads."""

    eps: float = 1e-6
    groups: tuple[int, int] = (8, 4)
    num_dense: int = 3
    small_heads: int = 64


def _read_indexed(
    kind: type[ConfigOf], c: Checkpoint, unstated: _Unstated, *, turns_pairs: bool, **own: Any
) -> ConfigOf:
    """Read the keys that these families share. turns_pairs: whether small heads turn elements side by side."""
    kinds = c.values.get("layer_types") or []
    if not isinstance(kinds, list) or any(kind not in ("indexed_attention", "full_attention") for kind in kinds):
        raise c.error("layer_types", '"indexed_attention" alone')
    config = kind.common_latent(
        c,
        norm_eps=c.positive_float("rms_norm_eps", unstated.eps),
        windows=(),
        mixture=corrected(c, groups=unstated.groups, factor=2.5),
        sparse=sparse_by_kind(c, unstated.num_dense),
        **own,
    )
    if not c.chooses_tokens(c.served_len):
        return config
    assert config.rope is not None
    rope = replace(config.rope, interleaved=turns_pairs)
    return replace(config, index=index_heads(c, rope, unstated.small_heads), attention=IndexedBlock)


@dataclass(frozen=True, kw_only=True)
class AXK2Config(IndexedConfig):
    """Adds the rank of the gates of norms."""

    gate_rank: int


class GatedNorm(nn.Module):
    """A norm whose results are multiplied with the sigmoid of gates, which a small MLP makes of them."""

    def __init__(self, c: AXK2Config) -> None:
        super().__init__()
        single = Mesh.single()
        self.norm = RMSNorm(c.hidden_size, c.norm_eps)
        self.gate_down = ColumnLinear(c.hidden_size, c.gate_rank, single)
        self.gate_up = ColumnLinear(c.gate_rank, c.hidden_size, single)
        self.gate = Elementwise("gated_by_sigmoid")

    def forward(self, x: Tensor) -> Tensor:
        """x [tokens, hidden] → [tokens, hidden]."""
        return self._gated(self.norm(x))

    def add(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return (norm of `x + residual`, `x + residual`), as `Norm.add` does."""
        normed, residual = self.norm.add(x, residual)
        return self._gated(normed), residual

    def _gated(self, normed: Tensor) -> Tensor:
        narrow = self.gate_down(normed)
        return self.gate(normed, self.gate_up(self.gate(narrow, narrow)))  # silu within


class GatedNormsLayer(GatedLayer):
    """Attention behind a `GatedNorm`, and an MLP, with a norm of this kind before it where it is a mixture."""

    input_layernorm: GatedNorm  # type: ignore[assignment]
    post_attention_layernorm: Norm | GatedNorm  # type: ignore[assignment]

    def __init__(self, c: AXK2Config, attention: nn.Module, mlp: nn.Module) -> None:
        super().__init__(c, attention, mlp)
        self.input_layernorm = GatedNorm(c)
        if isinstance(mlp, SparseMLP):
            self.post_attention_layernorm = GatedNorm(c)


class AXK2ForCausalLM(DeepseekV32ForCausalLM):
    """A.X K2: DeepSeek V3.2's blocks with gates of norms and of heads; experts have no groups unless stated.

    Source: https://huggingface.co/skt/A.X-K2.
    """

    RENAMED = {"gate_down": "W_down", "gate_up": "W_up"}

    @classmethod
    def read(cls, c: Checkpoint) -> AXK2Config:
        c.positive("q_lora_rank")
        return _read_indexed(
            AXK2Config,
            c,
            _Unstated(groups=(1, 1), num_dense=1, small_heads=16),
            turns_pairs=False,
            layer=GatedNormsLayer,
            has_query_gates=True,
            gate_rank=c.positive("gated_norm_rank", 16),
        )


@dataclass(frozen=True, kw_only=True)
class HYV4Config(IndexedConfig, StreamsConfig):
    """Adds streams. Queries choose tokens in contexts of every length."""

    most_written: float
    """The most of a block's output that goes into a stream."""


class TailIndexer(Indexer):
    """An indexer whose heads turn their last elements."""

    def __init__(self, c: HYV4Config, index: IndexHeads) -> None:
        super().__init__(c, index)
        self.k_norm = LayerNorm(index.size, c.norm_eps)

    def turned(self, queries: Tensor, keys: Tensor, batch: ModelInput) -> tuple[Tensor, Tensor]:
        still = queries.shape[2] - self.rope.rope.dim
        turning = (each[..., still:].contiguous() for each in (queries, keys))
        turned = zip((queries, keys), self.rope(*turning, batch), strict=True)
        queries, keys = (torch.cat((each[..., :still], end), -1) for each, end in turned)
        return queries, keys


class GatedIndexedBlock(IndexedBlock):
    """Attention over latents of chosen tokens with sinks, whose results are multiplied with the sigmoid of gates."""

    def __init__(self, c: HYV4Config, mesh: Mesh, layer: int) -> None:
        assert c.index is not None
        assert c.attention_scale is not None
        super().__init__(c, mesh, layer)
        heads = c.latent_heads
        start, count = mesh.share(heads.count, "attention heads")
        if self.indexer is not None:
            self.indexer = TailIndexer(c, c.index)
        own, rows = (slice(start * each, (start + count) * each) for each in (1, heads.value))
        self.attend = SinkChosenAttention(c.attention_scale, c.index.num_chosen, heads.count, own)
        self.gate_values = PickedLinear(c.hidden_size, [Pick("gate_proj", heads.count * heads.value, (rows,))])
        self.gate = Elementwise("gated_by_sigmoid")

    def attended(self, x: Tensor, batch: ModelInput) -> Tensor:
        """Return the attention's results of all heads, times their gates: x [tokens, hidden] → [tokens, heads ·
        value]."""
        return self.gate(super().attended(x, batch), self.gate_values(x))


class PlainHyperLayer(HyperLayer):
    """A layer whose streams are not mixed."""

    def connection(self, c: HYV4Config) -> PlainConnection:
        return PlainConnection(c.streams, c.most_written)


class HYV4ForCausalLM(StreamsDecoder):
    """Hy4: GLM-5's attention with sinks and gates, hyper-connections without a matrix, and mixtures of DeepSeek V3.

    In the model that reads images, elements side by side turn together, by three positions.
    Sources: https://huggingface.co/tencent/Hy4-preview, https://huggingface.co/tencent/Hy4.
    """

    REPLACED = {
        "hc_pre.hc_": "hc_",
        ".learnable_sink_param": ".sinks",
        ".linear_gate": ".gate_proj",
        ".hc_attn_layer.hc_": ".attn_hc.",
        ".hc_mlp_layer.hc_": ".ffn_hc.",
        "hc_head.hc_head_": "hc_head.hc_",
    }
    IGNORED = (*StreamsDecoder.IGNORED, r"mtp_layers\..*")

    @classmethod
    def read(cls, c: Checkpoint) -> HYV4Config:
        c.expect("hidden_act", "silu")
        reads_images = c.str("model_type").startswith("hy_v4_vl")
        if not reads_images:  # what this model states there means nothing
            c.expect("num_key_value_heads", c.positive("num_attention_heads"))
        layers, eps = c.positive("num_hidden_layers"), c.positive_float("rms_norm_eps", 1e-5)
        if c.values.get("layer_types") is not None:
            c.listed("layer_types", layers, lambda each: each == "indexed_attention", '"indexed_attention" alone')
        limit = (c.positive_float("swiglu_limit", 10.0),)
        mixture = replace(corrected(c, groups=(1, 1), factor=2.827), activation="capped_swiglu", numbers=limit)
        rope = read_rope(c, c.positive("qk_rope_head_dim"), interleaved=reads_images)
        kinds = ["shared" if layer and layer % 4 != 1 else "full" for layer in range(min(layers, MOST_LAYERS))]
        stated = any(c.values.get(name) is not None for name in ("indexer_types", "index_topk_pattern"))
        return HYV4Config.common_latent(
            c,
            rope=rope,
            norm_eps=eps,
            latent_eps=eps if reads_images else 1e-6,
            windows=(),
            mixture=mixture,
            sparse=sparse_by_kind(c, 1),
            index=index_heads(c, rope, 32 if reads_images else 16),
            sources=read_sources(c, layers) if stated else sources_of(kinds),
            attention=GatedIndexedBlock,
            layer=PlainHyperLayer,
            streams=read_streams(c, eps),
            most_written=c.positive_float("hc_magnitude", 2.0),
        )

    def __init__(self, c: HYV4Config, mesh: Mesh) -> None:
        check_first(c, mesh)
        super().__init__(c, mesh)
