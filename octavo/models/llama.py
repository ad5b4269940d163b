"""Llama 2 and 3: rotary grouped-query attention and a gated SiLU MLP. Source: https://arxiv.org/abs/2407.21783."""

from __future__ import annotations

from typing import Self

from torch import Tensor, nn

from octavo.attention.metadata import ModelInput
from octavo.config.checkpoint import Checkpoint
from octavo.distributed.mesh import Mesh
from octavo.layers.attention import PagedAttention
from octavo.layers.linear import QKVLinear, RowLinear
from octavo.layers.rotary import Rotary
from octavo.models.blocks import GatedDecoder
from octavo.models.config import DecoderConfig

ARCHITECTURES = ("LlamaForCausalLM",)


class LlamaConfig(DecoderConfig):
    """Biases are optional, heads may have a size of their own."""

    @classmethod
    def read(cls, c: Checkpoint) -> Self:
        """See `ConfigReader.read`."""
        c.expect("hidden_act", "silu")
        return cls.common(c, attention_bias=c.bool("attention_bias", False), mlp_bias=c.bool("mlp_bias", False))


class Attention(nn.Module):
    """Rotary grouped-query attention."""

    def __init__(self, c: DecoderConfig, mesh: Mesh, index: int) -> None:
        super().__init__()
        assert c.rope is not None
        self.qkv_proj = QKVLinear(c.hidden_size, c.heads, mesh, bias=c.attention_bias)
        self.rope = Rotary(c.rope)
        self.attend = PagedAttention(self.qkv_proj.local_heads, index)
        self.o_proj = RowLinear(c.heads.q_size, c.hidden_size, mesh, bias=c.attention_bias)

    def forward(self, x: Tensor, batch: ModelInput) -> Tensor:
        """x [tokens, hidden] → [tokens, hidden]."""
        q, k, v = self.qkv_proj(x)  # each [tokens, heads, dim]
        q, k = self.rope(q, k, batch)
        out: Tensor = self.o_proj(self.attend(q, k, v, batch))
        return out


class LlamaForCausalLM(GatedDecoder):
    """The whole model."""

    Config = LlamaConfig

    def __init__(self, c: LlamaConfig, mesh: Mesh) -> None:
        super().__init__(c, mesh, lambda index: Attention(c, mesh, index))


MODEL = LlamaForCausalLM
