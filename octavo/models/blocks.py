"""Llama's block, which many architectures share: pre-norm rotary attention, then a pre-norm gated SiLU MLP."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from octavo.attention.metadata import ModelInput
from octavo.distributed.mesh import Mesh
from octavo.layers.attention import PagedAttention
from octavo.layers.linear import GatedLinear, QKVLinear, joined_linear
from octavo.layers.norm import RMSNorm
from octavo.layers.rotary import Rotary
from octavo.models.config import DecoderConfig
from octavo.models.decoder import DecoderStack


class RotaryAttention(nn.Module):
    """Rotary grouped-query attention, over the window that the config has for the layer."""

    def __init__(self, c: DecoderConfig, mesh: Mesh, layer: int) -> None:
        super().__init__()
        assert c.rope is not None
        self.qkv_proj = QKVLinear(c.hidden_size, c.heads, mesh, bias=c.qkv_bias)
        self.rope = Rotary(c.rope)
        self.attend = PagedAttention(self.qkv_proj.local_heads, sliding_window=c.window_of(layer))
        self.o_proj = joined_linear(c.heads.q_size, c.hidden_size, mesh, bias=c.out_bias)

    def forward(self, x: Tensor, batch: ModelInput) -> Tensor:
        """x [tokens, hidden] → [tokens, hidden]."""
        q, k, v = self.qkv_proj(x)  # each [tokens, heads, dim]
        q, k = self.rope(q, k, batch)
        out: Tensor = self.o_proj(self.attend(q, k, v, batch))
        return out


class GatedMLP(nn.Module):
    """`down(silu(gate(x)) * up(x))`."""

    def __init__(self, c: DecoderConfig, mesh: Mesh) -> None:
        super().__init__()
        self.gate_up_proj = GatedLinear(c.hidden_size, c.intermediate_size, mesh, bias=c.mlp_bias)
        self.down_proj = joined_linear(c.intermediate_size, c.hidden_size, mesh, bias=c.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        """x [tokens, hidden] → [tokens, hidden]."""
        out: Tensor = self.down_proj(self.gate_up_proj(x))
        return out


class GatedLayer(nn.Module):
    """Attention and MLP, each behind a norm; the residual stream is carried beside x."""

    def __init__(self, c: DecoderConfig, attention: nn.Module, mlp: nn.Module) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(c.hidden_size, c.norm_eps)
        self.self_attn = attention
        self.post_attention_layernorm = RMSNorm(c.hidden_size, c.norm_eps)
        self.mlp = mlp

    def forward(self, x: Tensor, residual: Tensor | None, batch: ModelInput) -> tuple[Tensor, Tensor]:
        """Return (x, residual), each [tokens, hidden]; the stream is their sum."""
        x, residual = self.input_layernorm.add(x, residual)
        x, residual = self.post_attention_layernorm.add(self.self_attn(x, batch), residual)
        return self.mlp(x), residual


class GatedDecoder(DecoderStack):
    """A stack of `GatedLayer`s; `attention` and `mlp` make the modules of the layer with a given index."""

    def __init__(
        self,
        c: DecoderConfig,
        mesh: Mesh,
        attention: Callable[[int], nn.Module] | None = None,
        mlp: Callable[[int], nn.Module] | None = None,
    ) -> None:
        """attention, mlp: `RotaryAttention` and `GatedMLP` in every layer unless given."""
        attention = attention or (lambda layer: RotaryAttention(c, mesh, layer))
        mlp = mlp or (lambda _: GatedMLP(c, mesh))
        super().__init__(c, mesh, lambda index: GatedLayer(c, attention(index), mlp(index)))
