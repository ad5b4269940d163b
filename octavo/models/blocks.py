"""Llama's block, which many architectures share: pre-norm rotary attention, then a pre-norm gated SiLU MLP."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from octavo.attention.metadata import ModelInput
from octavo.distributed.mesh import Mesh
from octavo.layers.attention import PagedAttention
from octavo.layers.embedding import embedding_and_head
from octavo.layers.linear import GatedLinear, QKVLinear, RowLinear
from octavo.layers.norm import RMSNorm
from octavo.layers.rotary import Rotary
from octavo.models.causal_lm import CausalLM
from octavo.models.config import DecoderConfig


class RotaryAttention(nn.Module):
    """Rotary grouped-query attention, over the last `sliding_window` tokens where the config has one."""

    def __init__(
        self, c: DecoderConfig, mesh: Mesh, index: int, *, qkv_bias: bool = False, out_bias: bool = False
    ) -> None:
        super().__init__()
        assert c.rope is not None
        self.qkv_proj = QKVLinear(c.hidden_size, c.heads, mesh, bias=qkv_bias)
        self.rope = Rotary(c.rope)
        self.attend = PagedAttention(self.qkv_proj.local_heads, index, sliding_window=c.sliding_window)
        self.o_proj = RowLinear(c.heads.q_size, c.hidden_size, mesh, bias=out_bias)

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
        self.down_proj = RowLinear(c.intermediate_size, c.hidden_size, mesh, bias=c.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        """x [tokens, hidden] → [tokens, hidden]."""
        out: Tensor = self.down_proj(self.gate_up_proj(x))
        return out


class GatedLayer(nn.Module):
    """Attention and MLP, each behind a norm; the residual stream is carried beside x."""

    def __init__(self, c: DecoderConfig, mesh: Mesh, attention: nn.Module) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(c.hidden_size, c.norm_eps)
        self.self_attn = attention
        self.post_attention_layernorm = RMSNorm(c.hidden_size, c.norm_eps)
        self.mlp = GatedMLP(c, mesh)

    def forward(self, x: Tensor, residual: Tensor | None, batch: ModelInput) -> tuple[Tensor, Tensor]:
        """(x, residual), each [tokens, hidden]; the stream is their sum."""
        x, residual = self.input_layernorm.add(x, residual)
        x, residual = self.post_attention_layernorm.add(self.self_attn(x, batch), residual)
        return self.mlp(x), residual


class GatedDecoder(CausalLM):
    """Token embedding, layers, norm and head; a model brings the attention of each layer."""

    def __init__(self, c: DecoderConfig, mesh: Mesh, attention: Callable[[int], nn.Module]) -> None:
        super().__init__(c, mesh)
        self.embed_tokens, head = embedding_and_head(c.vocab_size, c.hidden_size, mesh, tied=c.tied)
        self.layers = nn.ModuleList(GatedLayer(c, mesh, attention(index)) for index in range(c.num_layers))
        self.norm = RMSNorm(c.hidden_size, c.norm_eps)
        self.lm_head = head

    def forward(self, batch: ModelInput) -> Tensor:
        """The normalised last hidden state of every token, [tokens, hidden]."""
        x, residual = self.embed_tokens(batch.token_ids), None
        for layer in self.layers:
            x, residual = layer(x, residual, batch)
        x, _ = self.norm.add(x, residual)
        return x

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """hidden [rows, hidden] → float32 [rows, vocabulary]."""
        logits: Tensor = self.lm_head(hidden)
        return logits
