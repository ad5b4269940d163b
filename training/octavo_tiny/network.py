"""The network of octavo-tiny as it is trained: a compact Qwen3-shaped decoder in plain PyTorch.

Kept apart from the engine's own model files on purpose: training wants dense sequences and gradients, serving wants
paged caches and none. The two meet in the exported directory, whose layout is Hugging Face's `Qwen3ForCausalLM`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class NetworkShape:
    """Sizes of the network; the defaults are those of the shipped model."""

    vocab_size: int = 3072
    hidden_size: int = 256
    num_layers: int = 6
    num_heads: int = 4
    num_kv_heads: int = 2
    head_size: int = 64
    intermediate_size: int = 704
    max_positions: int = 1024
    rope_theta: float = 10_000.0
    norm_epsilon: float = 1e-6

    def hugging_face_config(self, bos: int | None, eos: int, pad: int) -> dict[str, Any]:
        """Return the `config.json` of a checkpoint of this shape."""
        return {
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_size,
            "hidden_act": "silu",
            "max_position_embeddings": self.max_positions,
            "rms_norm_eps": self.norm_epsilon,
            "rope_theta": self.rope_theta,
            "rope_scaling": None,
            "attention_bias": False,
            "attention_dropout": 0.0,
            "use_sliding_window": False,
            "sliding_window": None,
            "max_window_layers": self.num_layers,
            "tie_word_embeddings": True,
            "use_cache": True,
            "initializer_range": 0.02,
            "bos_token_id": bos,
            "eos_token_id": eos,
            "pad_token_id": pad,
            "torch_dtype": "bfloat16",
        }


def rotary_tables(shape: NetworkShape, length: int) -> tuple[Tensor, Tensor]:
    """Return the cosines and sines of the rotary embedding, each `[length, head_size]` in float32."""
    exponents = torch.arange(0, shape.head_size, 2, dtype=torch.float32) / shape.head_size
    frequencies = shape.rope_theta**-exponents
    angles = torch.outer(torch.arange(length, dtype=torch.float32), frequencies)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Apply the rotary embedding in the half-split layout to `x` of `[batch, heads, length, head_size]`."""
    first, second = x.chunk(2, dim=-1)
    return x * cosines + torch.cat((-second, first), dim=-1) * sines


class Norm(nn.RMSNorm):
    """Root-mean-square norm that works in the type of its input, so that autocast keeps the fused kernel."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension of `x`."""
        return F.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), self.eps)


class Attention(nn.Module):
    """Grouped-query attention with normalised queries and keys, causal over the whole row."""

    def __init__(self, shape: NetworkShape) -> None:
        super().__init__()
        self.shape = shape
        self.q_proj = nn.Linear(shape.hidden_size, shape.num_heads * shape.head_size, bias=False)
        self.k_proj = nn.Linear(shape.hidden_size, shape.num_kv_heads * shape.head_size, bias=False)
        self.v_proj = nn.Linear(shape.hidden_size, shape.num_kv_heads * shape.head_size, bias=False)
        self.o_proj = nn.Linear(shape.num_heads * shape.head_size, shape.hidden_size, bias=False)
        self.q_norm = Norm(shape.head_size, eps=shape.norm_epsilon)
        self.k_norm = Norm(shape.head_size, eps=shape.norm_epsilon)

    def forward(self, x: Tensor, cosines: Tensor, sines: Tensor, mask: Tensor) -> Tensor:
        """Map `[batch, length, hidden]` to the same shape."""
        batch, length, _ = x.shape
        heads = (batch, length, -1, self.shape.head_size)
        query = rotate(self.q_norm(self.q_proj(x).view(heads)).transpose(1, 2), cosines, sines)
        key = rotate(self.k_norm(self.k_proj(x).view(heads)).transpose(1, 2), cosines, sines)
        value = self.v_proj(x).view(heads).transpose(1, 2)
        query, key = query.to(value.dtype), key.to(value.dtype)
        group = self.shape.num_heads // self.shape.num_kv_heads
        key, value = key.repeat_interleave(group, dim=1), value.repeat_interleave(group, dim=1)
        # written out: on CPUs the fused kernel's backward pass takes longer than these three operations
        scores = torch.matmul(query * self.shape.head_size**-0.5, key.transpose(-1, -2)) + mask
        mixed = torch.softmax(scores, dim=-1, dtype=value.dtype) @ value
        output: Tensor = self.o_proj(mixed.transpose(1, 2).reshape(batch, length, -1))
        return output


class FeedForward(nn.Module):
    """The gated SiLU feed-forward part of a layer."""

    def __init__(self, shape: NetworkShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map `[batch, length, hidden]` to the same shape."""
        output: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return output


class Layer(nn.Module):
    """One pre-norm decoder layer."""

    def __init__(self, shape: NetworkShape) -> None:
        super().__init__()
        self.input_layernorm = Norm(shape.hidden_size, eps=shape.norm_epsilon)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = Norm(shape.hidden_size, eps=shape.norm_epsilon)
        self.mlp = FeedForward(shape)

    def forward(self, x: Tensor, cosines: Tensor, sines: Tensor, mask: Tensor) -> Tensor:
        """Map `[batch, length, hidden]` to the same shape."""
        x = x + self.self_attn(self.input_layernorm(x), cosines, sines, mask)
        output: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return output


class Decoder(nn.Module):
    """Embedding, layers and final norm; its parameter names are those of the checkpoint below `model.`."""

    def __init__(self, shape: NetworkShape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.num_layers))
        self.norm = Norm(shape.hidden_size, eps=shape.norm_epsilon)


class Network(nn.Module):
    """The language model with tied embeddings."""

    def __init__(self, shape: NetworkShape) -> None:
        super().__init__()
        self.shape = shape
        self.model = Decoder(shape)
        cosines, sines = rotary_tables(shape, shape.max_positions)
        self.register_buffer("cosines", cosines, persistent=False)
        self.register_buffer("sines", sines, persistent=False)
        residual_scale = (2 * shape.num_layers) ** -0.5
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                scale = residual_scale if name.endswith(("o_proj.weight", "down_proj.weight")) else 1.0
                # an embedding that doubles as the output layer must start small, or the first logits are huge
                spread = 0.02 if "embed_tokens" in name else parameter.shape[1] ** -0.5
                nn.init.normal_(parameter, std=spread * scale)

    def hidden_states(self, ids: Tensor) -> Tensor:
        """Return the last hidden states `[batch, length, hidden]` of token ids `[batch, length]`."""
        length = ids.shape[1]
        cosines, sines = self.get_buffer("cosines")[:length], self.get_buffer("sines")[:length]
        x: Tensor = self.model.embed_tokens(ids)
        computed = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else x.dtype
        mask = torch.full((length, length), -torch.inf, dtype=computed).triu(1)
        for layer in self.model.layers:
            x = layer(x, cosines, sines, mask)
        normed: Tensor = self.model.norm(x)
        return normed

    def forward(self, ids: Tensor) -> Tensor:
        """Return the logits `[batch, length, vocab]` of token ids `[batch, length]`."""
        return F.linear(self.hidden_states(ids), self.model.embed_tokens.weight)
