"""BitNet b1.58: Llama with norms before the last products of attention and MLPs, and squares in the place of silu.

Weights are -1, 0 or 1 times one number (`quantization/bitnet.py`). Source: https://arxiv.org/abs/2504.12285.
"""

from __future__ import annotations

from torch import Tensor

from octavo.attention.metadata import ModelInput
from octavo.config.checkpoint import Checkpoint
from octavo.distributed.mesh import Mesh
from octavo.layers.norm import WidthNorm
from octavo.models.blocks import GatedDecoder, GatedMLP, RotaryAttention
from octavo.models.config import DecoderConfig
from octavo.models.fields import BIAS, EPS, Read, fields


class NormedAttention(RotaryAttention):
    """Attention with a norm over all heads of a token before their product."""

    def __init__(self, c: DecoderConfig, mesh: Mesh, layer: int) -> None:
        super().__init__(c, mesh, layer)
        self.attn_sub_norm = WidthNorm(c.heads.query, c.heads.dim, c.norm_eps, mesh, c.heads.query_share(mesh))
        self._dim = c.heads.dim

    def forward(self, x: Tensor, batch: ModelInput) -> Tensor:
        """x [tokens, hidden] → [tokens, hidden]."""
        attended = self.attended(x, batch).view(len(x), -1, self._dim)
        return self.o_proj(self.attn_sub_norm(attended).flatten(1))


class NormedMLP(GatedMLP):
    """`down(norm(relu(gate(x))² * up(x)))`."""

    def __init__(self, c: DecoderConfig, mesh: Mesh) -> None:
        super().__init__(c, mesh)
        self.ffn_sub_norm = WidthNorm(c.intermediate_size, 1, c.norm_eps, mesh, self.gate_up_proj.share_of(0))

    def forward(self, x: Tensor) -> Tensor:
        """x [tokens, hidden] → [tokens, hidden]."""
        return self.down_proj(self.ffn_sub_norm(self.gate_up_proj(x)[..., None]).flatten(1))


class BitNetForCausalLM(GatedDecoder):
    """The whole model. The first ones, of which there are files of llama.cpp, have silu."""

    FIELDS = fields(
        norm_eps=EPS,
        bias=BIAS,
        activation=Read(Checkpoint.expect, "hidden_act", "relu2", "silu"),
        attention=NormedAttention,
        mlp=NormedMLP,
    )
