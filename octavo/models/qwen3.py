"""Qwen3: grouped-query attention with per-head q/k norms and a gated SiLU MLP. Source: https://arxiv.org/abs/2505.09388."""

from __future__ import annotations

from typing import Self

from torch import Tensor, nn

from octavo.attention.metadata import ModelInput
from octavo.config.checkpoint import Checkpoint
from octavo.distributed.mesh import Mesh
from octavo.layers.attention import PagedAttention
from octavo.layers.linear import QKVLinear, joined_linear
from octavo.layers.norm import RMSNorm
from octavo.layers.rotary import Rotary
from octavo.models.blocks import GatedDecoder
from octavo.models.config import DecoderConfig, read_windows

ARCHITECTURES = ("Qwen3ForCausalLM",)


class Qwen3Config(DecoderConfig):
    """Heads have a size of their own; the releases switch the sliding window off, and where it is on, the layers from
    `max_window_layers` on have it."""

    @classmethod
    def read(cls, c: Checkpoint) -> Self:
        c.expect("hidden_act", "silu")
        bias = c.bool("attention_bias", False)
        return cls.common(
            c,
            head_dim=c.positive("head_dim", 128),
            qkv_bias=bias,
            out_bias=bias,
            windows=read_windows(c, is_windowed=c.bool("use_sliding_window", False)),
        )


class Attention(nn.Module):
    """Rotary grouped-query attention; every head of q and k is normalised before it turns."""

    def __init__(self, c: DecoderConfig, mesh: Mesh, layer: int) -> None:
        super().__init__()
        assert c.rope is not None
        self.qkv_proj = QKVLinear(c.hidden_size, c.heads, mesh, bias=c.qkv_bias)
        self.q_norm, self.k_norm = RMSNorm(c.heads.dim, c.norm_eps), RMSNorm(c.heads.dim, c.norm_eps)
        self.rope = Rotary(c.rope)
        self.attend = PagedAttention(self.qkv_proj.local_heads, sliding_window=c.window_of(layer))
        self.o_proj = joined_linear(c.heads.q_size, c.hidden_size, mesh, bias=c.out_bias)

    def forward(self, x: Tensor, batch: ModelInput) -> Tensor:
        """x [tokens, hidden] → [tokens, hidden]."""
        q, k, v = self.qkv_proj(x)  # each [tokens, heads, dim]
        q, k = self.rope(q, k, batch, norms=(self.q_norm, self.k_norm))
        out: Tensor = self.o_proj(self.attend(q, k, v, batch))
        return out


class Qwen3ForCausalLM(GatedDecoder):
    """The whole model."""

    Config = Qwen3Config

    def __init__(self, c: Qwen3Config, mesh: Mesh) -> None:
        super().__init__(c, mesh, lambda layer: Attention(c, mesh, layer))


MODEL = Qwen3ForCausalLM
