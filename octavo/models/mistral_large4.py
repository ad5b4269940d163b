"""Mistral Large 4: attention over latents of chosen tokens, which later layers share with earlier ones.

Frequencies of the rotation are learned, some layers do not rotate, and queries are scaled by the logarithm of their
position. Source: Mistral AI's releases.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor, nn

from octavo.attention.metadata import ModelInput
from octavo.config.checkpoint import Checkpoint
from octavo.core.model_shape import IndexedLatent, LayerCache
from octavo.distributed.mesh import Mesh
from octavo.layers.chosen import ChosenAttention, TokenChoice
from octavo.layers.latent import LatentHeads, LatentProjections, LatentQueries
from octavo.layers.linear import ColumnLinear, joined_linear
from octavo.layers.norm import LayerNorm, RMSNorm
from octavo.layers.rotary import LearnedRotary, PositionScale
from octavo.models.blocks import GatedDecoder
from octavo.models.fields import read_cap
from octavo.models.indexed import KEY_EPS, IndexedConfig, Indexer, check_first, index_heads, read_sources
from octavo.models.mistral_names import text_name
from octavo.models.ropes import read_turns
from octavo.models.sparse import MISTRAL, read_mixture, sparse_by_kind


@dataclass(frozen=True, kw_only=True)
class MistralLarge4Config(IndexedConfig):
    """Adds the fields that differ between layers. `latent_heads` are those of layers that rotate."""

    turns: tuple[bool, ...]
    """For each layer whether its heads turn."""
    writers: tuple[int, ...]
    """For each layer the one whose latents it reads: itself, or an earlier one."""

    def heads_at(self, layer: int) -> LatentHeads:
        """Return the heads of a layer: where nothing turns, all elements of a query are plain."""
        heads = self.latent_heads
        return heads if self.turns[layer] else replace(heads, plain=heads.query, turned=0)

    def caches_of(self, layer: int, mesh: Mesh) -> Sequence[LayerCache]:
        assert self.index is not None
        heads, index = self.heads_at(layer), self.index
        small = index.size if self.source_of(layer) == layer else 0
        latent = (heads.latent + heads.turned, heads.latent) if self.writers[layer] == layer else (0, 0)
        return (LayerCache(IndexedLatent(*latent, small, index.num_chosen)),) if small or latent[0] else ()

    def position_bytes(self) -> int:
        return super().position_bytes() + 4  # the logarithm


class ScaledIndexer(Indexer):
    """An indexer whose queries are made of the stream and scaled by their positions. rope: None where nothing turns."""

    rope: LearnedRotary | None  # type: ignore[assignment]

    def __init__(self, c: MistralLarge4Config, rope: LearnedRotary | None) -> None:
        assert c.index is not None
        super().__init__(c, c.index)
        self.rope = rope
        self.q_input_norm = LayerNorm(c.hidden_size, KEY_EPS)
        self.softmax_scaling = PositionScale(c.index.count, slice(0, c.index.count))

    def turned(self, queries: Tensor, keys: Tensor, batch: ModelInput) -> tuple[Tensor, Tensor]:
        """Scale queries [tokens, heads, size], and turn them and keys [tokens, 1, size]."""
        (queries,) = self.softmax_scaling((queries,), batch)
        return (queries, keys) if self.rope is None else self.rope(queries, keys, batch)


class SharingBlock(nn.Module):
    """Attention over chosen latents, which are the layer's own or those of an earlier one."""

    def __init__(self, c: MistralLarge4Config, mesh: Mesh, layer: int, rope: LearnedRotary) -> None:
        super().__init__()
        assert c.index is not None
        assert c.attention_scale is not None
        self.heads = heads = c.heads_at(layer)
        start, count = mesh.share(heads.count, "attention heads")
        self.writes = c.writers[layer] == layer
        self.rope = rope if c.turns[layer] else None
        self.q_proj = LatentQueries(c.hidden_size, heads, mesh)
        self.softmax_scaling = PositionScale(heads.count, slice(start, start + count))
        self.attend = ChosenAttention(c.attention_scale, c.index.num_chosen)
        if self.writes:
            single = Mesh.single()
            self.kv_a_proj_with_mqa = ColumnLinear(c.hidden_size, heads.latent + heads.turned, single, bias=c.qkv_bias)
            self.kv_a_layernorm = RMSNorm(heads.latent, c.latent_eps)
        else:
            self.attend.shares_cache_of = c.writers[layer]
        self.indexer = ScaledIndexer(c, self.rope) if c.source_of(layer) == layer else None
        # a layer without latents of its own has a cache for small keys alone
        self.choice: TokenChoice = self.attend
        if self.indexer is not None and not self.writes:
            self.choice = TokenChoice(c.index.num_chosen)
        self.kv_b_proj = LatentProjections(heads, mesh)
        self.o_proj = joined_linear(heads.count * heads.value, c.hidden_size, mesh, bias=c.out_bias)

    def forward(self, x: Tensor, batch: ModelInput) -> Tensor:
        """x [tokens, hidden] → [tokens, hidden]."""
        plain, turned = self.softmax_scaling(self.q_proj(x), batch)
        latents, key = x.new_empty((0, self.heads.latent)), turned[:, :0]
        if self.writes:
            narrow = self.kv_a_proj_with_mqa(x)
            latents = self.kv_a_layernorm(narrow[:, : self.heads.latent])
            key = narrow[:, self.heads.latent :].unsqueeze(1)
        if self.rope is not None:
            turned, key = self.rope(turned, key, batch)
        if self.indexer is not None:
            inputs = self.indexer.q_input_norm(x)
            self.choice.choose(self.indexer(x, inputs, batch), batch)
        sums = self.attend((self.kv_b_proj.absorb(plain), turned), (latents, key.flatten(0, 1)), batch)
        return self.o_proj(self.kv_b_proj.values(sums))


class MistralLarge4ForConditionalGeneration(GatedDecoder):
    """The text model. Queries choose tokens in contexts of every length."""

    IGNORED = (*GatedDecoder.IGNORED, r"pre_mm_projector_norm\.weight")

    @classmethod
    def read(cls, c: Checkpoint) -> MistralLarge4Config:
        layers = c.positive("num_hidden_layers")
        if c.values.get("layer_types") is not None:
            c.listed("layer_types", layers, lambda each: each == "indexed_attention", '"indexed_attention" alone')
        eps = c.positive_float("rms_norm_eps", 1e-5)
        turns = read_turns(c, layers)
        config = MistralLarge4Config.common_latent(
            c,
            norm_eps=eps,
            latent_eps=eps,
            windows=(),
            mixture=read_mixture(c, **MISTRAL),
            sparse=sparse_by_kind(c, 1),
            logit_soft_cap=read_cap(c, "final_logit_softcapping", 30.0),
            sources=read_sources(c, layers),
            turns=turns,
            writers=_read_writers(c, turns),
        )
        assert config.rope is not None
        # queries are made of the stream, even if a config says otherwise
        return replace(config, q_rank=None, index=index_heads(c, config.rope, 32, needs_rank=False))

    def __init__(self, c: MistralLarge4Config, mesh: Mesh) -> None:
        check_first(c, mesh)
        assert c.rope is not None
        rope = LearnedRotary(c.rope)
        super().__init__(c, mesh, attention=lambda layer: SharingBlock(c, mesh, layer, rope))
        self.rotary_emb = rope  # of stages whose layers do not turn, too

    def own_name(self, name: str) -> str:
        return text_name(super().own_name(name))


def _read_writers(c: Checkpoint, turns: Sequence[bool]) -> tuple[int, ...]:
    """Return for each layer the one whose latents it reads. Raises CheckpointError."""
    if c.values.get("kv_source_layers") is None:
        return tuple(range(len(turns)))
    expected = f"for each of {len(turns)} layers itself, or an earlier one that is its own and turns as it does"
    found = c.listed("kv_source_layers", len(turns), lambda each: type(each) is int, expected)
    for layer, writer in enumerate(found):
        if not 0 <= writer <= layer or found[writer] != writer or turns[writer] != turns[layer]:
            raise c.error("kv_source_layers", expected)
    return tuple(found)
