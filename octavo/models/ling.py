"""Ling 2.5 and Ring 2.5: linear attention with a fixed decay in most layers, attention over latents in the others.

Sources: https://arxiv.org/abs/2510.19338, Ant Group's releases.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from octavo.attention.metadata import ModelInput
from octavo.config.checkpoint import Checkpoint
from octavo.distributed.mesh import Mesh
from octavo.layers.elementwise import Elementwise
from octavo.layers.heads import Heads
from octavo.layers.layer import Binding, Layer, TensorSlot
from octavo.layers.lightning import DecayingAttention, lightning_sizes
from octavo.layers.linear import ColumnLinear, QKVLinear, joined_linear
from octavo.layers.norm import RMSNorm
from octavo.layers.rope import Rope
from octavo.layers.rotary import Rotary
from octavo.models.blocks import GatedDecoder
from octavo.models.config import even_share
from octavo.models.fields import LING
from octavo.models.hybrid import ATTENTION, RECURRENT, HybridConfig
from octavo.models.latent import LatentConfig
from octavo.models.ropes import read_rope
from octavo.models.sparse import COUNTS, corrected, dense_first


@dataclass(frozen=True, kw_only=True)
class LingConfig(HybridConfig, LatentConfig):
    """Latents of the last layer of each group, and of those behind the last whole group; states of the others."""

    linear_heads: Heads
    linear_rope: Rope | None
    norm_groups: int
    """Parts of the heads' results, which are normalised each."""


class GroupNorm(Layer):
    """Scales each of `groups` parts of a row by its root mean square, and the row by a weight, of which a rank has
    `share` (start, length)."""

    def __init__(self, width: int, groups: int, eps: float, share: tuple[int, int]) -> None:
        super().__init__()
        self._width, self._rows, self._group, self._eps = width, slice(share[0], sum(share)), width // groups, eps
        self.weight = nn.Parameter(torch.empty(share[1]), requires_grad=False)

    def bind(self, binding: Binding) -> None:
        """Store the operators, and the weight within a group."""
        super().bind(binding)
        self._ones = torch.ones(self._group, dtype=self.weight.dtype, device=binding.device)

    def forward(self, x: Tensor) -> Tensor:
        """x [tokens, this rank's share of the width] → the same shape."""
        normed = self.ops.rms_norm(x.view(-1, self._group), self._ones, self._eps)
        return self.ops.multiplied(normed.view(x.shape), self.weight)

    def tensor_slots(self, path: str) -> Iterator[TensorSlot]:
        def fill(stored: Tensor) -> None:
            self.hold("weight", stored[self._rows])

        yield TensorSlot(f"{path}.weight", (self._width,), fill, parts=((self._rows,),))


class LingAttention(DecayingAttention):
    """Rotated queries and keys with norms of heads, and norms of groups of heads and a gate behind the scan."""

    def __init__(self, c: LingConfig, mesh: Mesh, layer: int) -> None:
        heads, hidden, depth = c.linear_heads, c.hidden_size, layer / max(c.num_layers - 1, 1)
        super().__init__(c.sizes, mesh, 1 - depth + 1e-5)
        mesh.share(c.norm_groups, "groups of the norm behind linear attention")
        self.qkv_proj = QKVLinear(hidden, heads, mesh, reads=())
        self.q_norm, self.k_norm = RMSNorm(heads.dim, c.norm_eps), RMSNorm(heads.dim, c.norm_eps)
        assert c.linear_rope is not None
        self.rope = Rotary(c.linear_rope)
        self.scale = Elementwise("scaled", heads.dim**-0.5)
        self.g_norm = GroupNorm(heads.q_size, c.norm_groups, c.norm_eps, heads.query_share(mesh))
        self.g_proj = ColumnLinear(hidden, heads.q_size, mesh)
        self.gate = Elementwise("gated_by_sigmoid")
        self.o_proj = joined_linear(heads.q_size, hidden, mesh)

    def forward(self, x: Tensor, batch: ModelInput) -> Tensor:
        """x [tokens, hidden] → [tokens, hidden]."""
        q, k, v = self.qkv_proj(x)
        q, k = self.rope(q, k, batch, (self.q_norm, self.k_norm))
        normed = self.g_norm(self.scale(self.scan(q, k, v, batch).flatten(1)))
        return self.o_proj(self.gate(normed, self.g_proj(x)))


class BailingMoeV2_5ForCausalLM(GatedDecoder):  # noqa: N801
    """The whole model. Mixtures are those of Ling 2.0."""

    RENAMED = LING

    @classmethod
    def read(cls, c: Checkpoint) -> LingConfig:
        c.expect_all(use_linear_silu=False, linear_silu=False, linear_rope=True, use_qk_norm=True)
        c.expect_all(use_bias=False, use_qkv_bias=False, use_sliding_window=False, norm_head=False)
        c.expect("score_function", "sigmoid")
        query, hidden = c.positive("num_attention_heads"), c.positive("hidden_size")
        dim = c.optional_positive("head_dim") or even_share(c, "hidden_size", hidden, query)
        groups = c.divisor("group_norm_size", "num_attention_heads", query, 1)
        layers, group = range(c.positive("num_hidden_layers")), c.positive("layer_group_size", 1)
        is_whole = [layer < len(layers) // group * group for layer in layers]
        kinds = [RECURRENT if is_whole[layer] and (layer + 1) % group else ATTENTION for layer in layers]
        return LingConfig.common_latent(
            c,
            kinds=tuple(kinds),
            sizes=lightning_sizes(query, dim),
            recurrence=LingAttention,
            linear_heads=Heads(query, query, dim),
            linear_rope=read_rope(c, dim, share=1.0),
            norm_groups=groups,
            mixture=corrected(c, factor=2.5, correction="gate.expert_bias", **COUNTS),
            sparse=dense_first(c, 1),
        )
