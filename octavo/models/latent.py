"""Attention over latents in decoders: what configs say about it, its block, and the stack of such blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor, nn

from octavo.attention.metadata import ModelInput
from octavo.config.checkpoint import Checkpoint
from octavo.core.model_shape import Latent, LayerCache
from octavo.distributed.mesh import Mesh
from octavo.layers.elementwise import Elementwise
from octavo.layers.heads import Heads
from octavo.layers.latent import GatedLatentQueries, LatentAttention, LatentHeads, LatentProjections, LatentQueries
from octavo.layers.linear import ColumnLinear, joined_linear
from octavo.layers.norm import RMSNorm, ScaledNorm
from octavo.layers.rope import ProportionalScaling, YarnScaling
from octavo.layers.rotary import Rotary
from octavo.models.blocks import GatedDecoder
from octavo.models.config import DecoderConfig
from octavo.models.ropes import read_rope


@dataclass(frozen=True, kw_only=True)
class LatentConfig(DecoderConfig):
    """Adds the sizes of attention over latents. `heads` is how its cache sees them: all share one key."""

    latent_heads: LatentHeads
    q_rank: int | None
    """The width of the vectors that queries are made from; None where they are made from the stream."""
    latent_eps: float = 1e-6
    """The eps of the norms of latents; the norms of the stream may have another."""
    latent_factor: float = 1.0
    """The factor of normalised latents."""
    has_query_gates: bool = False
    """Whether queries are made of `q_rank` elements behind their norm and before it, and results of heads are
    multiplied with the sigmoid of gates that are stored with the queries."""

    @classmethod
    def common_latent(cls, c: Checkpoint, *, value_dim: int | None = None, may_turn: bool = True, **own: Any) -> Self:
        """Read the keys that families with latents share; `own` adds or replaces fields.

        value_dim: elements of a value where the config does not say; None where it has to. may_turn: False for heads
        without rotary embedding.
        """
        heads = LatentHeads(
            c.positive("num_attention_heads"),
            c.positive("kv_lora_rank"),
            c.positive("qk_nope_head_dim"),
            c.positive("qk_rope_head_dim") if may_turn else c.expect("qk_rope_head_dim", 0),
            c.optional_positive("v_head_dim") or value_dim or c.positive("v_head_dim"),
        )
        width = heads.latent + heads.turned
        if "rope" not in own:
            own["rope"] = read_rope(c, heads.turned, interleaved=c.bool("rope_interleave", True))
        return cls.common(
            c,
            head_dim=width,
            heads=Heads(heads.count, 1, width),
            latent_heads=heads,
            q_rank=c.optional_positive("q_lora_rank"),
            attention_scale=float(heads.query**-0.5) if own["rope"] is None else _scale(c, heads),
            bias=c.bool("attention_bias", False),
            **{"attention": LatentBlock, **own},
        )

    def caches_of(self, layer: int, mesh: Mesh) -> Sequence[LayerCache]:
        heads = self.latent_heads
        return (LayerCache(Latent(heads.latent + heads.turned, heads.latent)),)


def _scale(c: Checkpoint, heads: LatentHeads) -> float:
    """Return the factor of scores. YaRN multiplies it, where `mscale_all_dim` says by how much."""
    scale, rope = float(heads.query**-0.5), c.rope()
    if rope.str("rope_type") != "yarn" or not rope.values.get("mscale_all_dim"):
        return scale
    factor = YarnScaling.default_attention_factor(rope.positive_float("factor"), rope.positive_float("mscale_all_dim"))
    return scale * factor * factor


class LatentBlock(nn.Module):
    """Attention over latents, its queries made from the stream or from `q_rank` elements."""

    def __init__(self, c: LatentConfig, mesh: Mesh, layer: int) -> None:
        super().__init__()
        heads, single, hidden = c.latent_heads, Mesh.single(), c.hidden_size
        self.heads, self._q_rank, self._has_gates = heads, c.q_rank or 0, c.has_query_gates
        sections, reads = [heads.latent + heads.turned], ["kv_a_proj_with_mqa"]
        if c.q_rank is None:
            self.q_proj = LatentQueries(hidden, heads, mesh)
        else:
            sections, reads = [c.q_rank, *sections], ["q_a_proj", *reads]
            self.q_a_layernorm = RMSNorm(c.q_rank, c.latent_eps)
            self.q_b_proj: LatentQueries | GatedLatentQueries
            if c.has_query_gates:
                self.q_b_proj = GatedLatentQueries("q_b_proj", 2 * c.q_rank, heads, mesh)
                self.gate_heads = Elementwise("gated_by_sigmoid")
            else:
                self.q_b_proj = LatentQueries(c.q_rank, heads, mesh)
        self.a_proj = ColumnLinear(hidden, sections, single, bias=c.qkv_bias, reads=reads)
        factor, eps = c.latent_factor, c.latent_eps
        self.kv_a_layernorm = RMSNorm(heads.latent, eps) if factor == 1 else ScaledNorm(heads.latent, eps, factor)
        self.kv_b_proj = LatentProjections(heads, mesh)
        self.rope = self.growth = None
        if c.rope is not None:
            self.rope = Rotary(c.rope)
            # the elements that do not turn grow with the position, too
            still = replace(c.rope, dim=heads.plain, scaling=ProportionalScaling(0))
            self.growth = None if c.rope.query_growth is None else Rotary(still)
        assert c.attention_scale is not None
        self.attend = LatentAttention(c.attention_scale)
        self.o_proj = joined_linear(heads.count * heads.value, hidden, mesh, bias=c.out_bias)

    def forward(self, x: Tensor, batch: ModelInput) -> Tensor:
        """x [tokens, hidden] → [tokens, hidden]."""
        return self.o_proj(self.attended(x, batch))

    def prepare_choice(self, x: Tensor, inputs: Tensor, batch: ModelInput) -> None:
        """Choose the tokens that queries attend to, where they do not attend to all.

        x [tokens, hidden], inputs [tokens, q_rank]: those of the queries.
        """

    def attended(self, x: Tensor, batch: ModelInput) -> Tensor:
        """Return the attention's results by head, before heads are joined: x [tokens, hidden] → [tokens, heads ·
        value]."""
        narrow, edge = self.a_proj(x), self._q_rank + self.heads.latent
        inputs = self.q_a_layernorm(narrow[:, : self._q_rank]) if self._q_rank else x
        plain, turned, *gates = self._queries(inputs, narrow)
        latents = self.kv_a_layernorm(narrow[:, self._q_rank : edge])
        if self.growth is not None:
            plain, _ = self.growth(plain, plain[:, :1], batch)
        key = narrow[:, edge:]
        if self.rope is not None:
            turned, keys = self.rope(turned, key.unsqueeze(1), batch)
            key = keys.squeeze(1)
        self.prepare_choice(x, inputs, batch)
        sums = self.attend((self.kv_b_proj.absorb(plain), turned), (latents, key), batch)
        values = self.kv_b_proj.values(sums)
        return self.gate_heads(values, *gates) if gates else values

    def _queries(self, inputs: Tensor, narrow: Tensor) -> tuple[Tensor, ...]:
        """Return both parts of queries, and gates where there are any."""
        if not self._q_rank:
            return self.q_proj(inputs)
        if self._has_gates:
            inputs = torch.cat((inputs, narrow[:, : self._q_rank]), 1)
        return self.q_b_proj(inputs)


class LatentDecoder(GatedDecoder):
    """A stack of layers with attention over latents."""

    COMMON = LatentConfig.common_latent
