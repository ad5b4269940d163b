"""The choice of tokens by an indexer, which families with attention over latents share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from torch import Tensor, nn

from octavo.attention.metadata import ModelInput
from octavo.config.checkpoint import Checkpoint
from octavo.core.model_shape import IndexedLatent, LayerCache
from octavo.distributed.mesh import Mesh
from octavo.errors import ConfigError
from octavo.layers.linear import ColumnLinear
from octavo.layers.norm import LayerNorm
from octavo.layers.rope import Rope
from octavo.layers.rotary import Rotary
from octavo.layers.routers import ExactLinear
from octavo.models.latent import LatentConfig
from octavo.ops.chosen_tokens import SmallHeads

KEY_EPS: Final = 1e-6
"""The eps of the norms of an indexer's keys."""


@dataclass(frozen=True, slots=True)
class IndexHeads:
    """The small heads of the choice: their number, size and rotation, and the number of tokens that they choose."""

    count: int
    size: int
    rope: Rope
    num_chosen: int


@dataclass(frozen=True, kw_only=True)
class IndexedConfig(LatentConfig):
    """Adds the choice; `index` is None where contexts are so short that queries attend to all tokens."""

    index: IndexHeads | None = None
    sources: tuple[int, ...] = ()
    """For each layer the layer that chooses for it: itself, or an earlier one."""

    def source_of(self, layer: int) -> int:
        """Return the layer that chooses for a layer: itself where there are no `sources`, and for a prediction layer,
        whose config has one layer more than there are sources."""
        return self.sources[layer] if self.num_layers == len(self.sources) else layer

    def caches_of(self, layer: int, mesh: Mesh) -> Sequence[LayerCache]:
        if self.index is None:
            return super().caches_of(layer, mesh)
        heads, size = self.latent_heads, self.index.size if self.source_of(layer) == layer else 0
        return (LayerCache(IndexedLatent(heads.latent + heads.turned, heads.latent, size, self.index.num_chosen)),)

    def all_ropes(self) -> set[Rope]:
        return super().all_ropes() | (set() if self.index is None else {self.index.rope})


class Indexer(nn.Module):
    """Makes the small queries and keys of the choice, and the weights of heads. Every rank has all of it."""

    def __init__(self, c: IndexedConfig, index: IndexHeads) -> None:
        super().__init__()
        self._heads, single = index, Mesh.single()
        self.wq_b = ColumnLinear(c.q_rank or c.hidden_size, index.count * index.size, single)
        self.wk = ColumnLinear(c.hidden_size, index.size, single)
        self.k_norm = LayerNorm(index.size, KEY_EPS)
        self.weights_proj = ExactLinear(c.hidden_size, index.count)
        self.rope = Rotary(index.rope)

    def forward(self, x: Tensor, inputs: Tensor, batch: ModelInput) -> SmallHeads:
        """x [tokens, hidden], inputs [tokens, q_rank], or [tokens, hidden] where there is no rank."""
        heads = self._heads
        queries = self.wq_b(inputs).view(len(x), heads.count, heads.size)
        queries, keys = self.turned(queries, self.k_norm(self.wk(x)).unsqueeze(1), batch)
        # the factor of products is positive: it may stand outside of the ReLU
        weights = self.weights_proj(x) * (heads.count * heads.size) ** -0.5
        return SmallHeads(queries, weights, keys.squeeze(1))

    def turned(self, queries: Tensor, keys: Tensor, batch: ModelInput) -> tuple[Tensor, Tensor]:
        """Turn queries [tokens, heads, size] and keys [tokens, 1, size]."""
        return self.rope(queries, keys, batch)


def check_first(c: IndexedConfig, mesh: Mesh) -> None:
    """Raise ConfigError where another stage would choose for this stage's first layer."""
    first = mesh.layer_range(c.num_layers).start
    if c.source_of(first) != first:
        raise ConfigError(
            f"pipeline_parallel_size: layer {first} attends to the tokens that layer {c.source_of(first)} chooses, "
            "which another stage would have; use tensor_parallel_size"
        )


def index_heads(c: Checkpoint, rope: Rope, default_count: int, *, needs_rank: bool = True) -> IndexHeads:
    """Return the small heads of a config. Raises CheckpointError.

    needs_rank: whether their queries are made of the `q_lora_rank` elements of others.
    """
    size = c.positive("index_head_dim", 128)
    if size < rope.dim:
        raise c.error("index_head_dim", f"at least qk_rope_head_dim, which is {rope.dim}")
    if needs_rank:
        c.positive("q_lora_rank")
    return IndexHeads(c.positive("index_n_heads", default_count), size, rope, c.positive("index_topk", 2048))


def read_sources(c: Checkpoint, num_layers: int) -> tuple[int, ...]:
    """Return for each layer which one chooses for it. Raises CheckpointError."""
    kinds = ["full"] * num_layers
    if c.values.get("indexer_types") is not None:
        expected = f'"full" or "shared" for each of {num_layers} layers'
        kinds = c.listed("indexer_types", num_layers, lambda each: each in ("full", "shared"), expected)
    elif isinstance(pattern := c.values.get("index_topk_pattern"), str | list):
        kinds = [{"F": "full", "S": "shared"}.get(str(each), str(each)) for each in pattern]
        if len(kinds) != num_layers or not {"full", "shared"}.issuperset(kinds):
            raise c.error("index_topk_pattern", f'"F" or "S" for each of {num_layers} layers')
    elif c.values.get("index_topk_freq") is not None:
        every, offset = c.positive("index_topk_freq"), c.count("index_skip_topk_offset", 2)
        kinds = ["full" if max(layer - offset + 1, 0) % every == 0 else "shared" for layer in range(num_layers)]
    if kinds[0] != "full":
        raise c.error("indexer_types", '"full" for the first layer')
    return sources_of(kinds)


def sources_of(kinds: Sequence[str]) -> tuple[int, ...]:
    """Return for each layer, "full" or "shared", which one chooses for it."""
    sources = [0]
    for layer, kind in enumerate(kinds[1:], 1):
        sources.append(layer if kind == "full" else sources[-1])
    return tuple(sources)
