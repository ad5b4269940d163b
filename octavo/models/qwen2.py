"""Qwen2 and 2.5: Llama's block with biased queries, keys and values. Source: https://arxiv.org/abs/2407.10671."""

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

ARCHITECTURES = ("Qwen2ForCausalLM",)


class Qwen2Config(DecoderConfig):
    """Its releases switch the sliding window off."""

    @classmethod
    def read(cls, c: Checkpoint) -> Self:
        """See `ConfigReader.read`."""
        c.expect("hidden_act", "silu")
        c.expect("use_sliding_window", False)
        return cls.common(c)


class Attention(nn.Module):
    """Rotary grouped-query attention with biases before it and none after."""

    def __init__(self, c: DecoderConfig, mesh: Mesh, index: int) -> None:
        super().__init__()
        assert c.rope is not None
        self.qkv_proj = QKVLinear(c.hidden_size, c.heads, mesh, bias=True)
        self.rope = Rotary(c.rope)
        self.attend = PagedAttention(self.qkv_proj.local_heads, index)
        self.o_proj = RowLinear(c.heads.q_size, c.hidden_size, mesh)

    def forward(self, x: Tensor, batch: ModelInput) -> Tensor:
        """x [tokens, hidden] → [tokens, hidden]."""
        q, k, v = self.qkv_proj(x)  # each [tokens, heads, dim]
        q, k = self.rope(q, k, batch)
        out: Tensor = self.o_proj(self.attend(q, k, v, batch))
        return out


class Qwen2ForCausalLM(GatedDecoder):
    """The whole model."""

    Config = Qwen2Config

    def __init__(self, c: Qwen2Config, mesh: Mesh) -> None:
        super().__init__(c, mesh, lambda index: Attention(c, mesh, index))


MODEL = Qwen2ForCausalLM
