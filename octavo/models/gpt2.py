"""GPT-2: learned positions, pre-norm blocks, weights stored [inputs, outputs].

Source: Radford et al., "Language Models are Unsupervised Multitask Learners".
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Self

from torch import Tensor, nn

from octavo.attention.metadata import ModelInput
from octavo.config.checkpoint import Checkpoint
from octavo.distributed.mesh import Mesh
from octavo.layers.attention import PagedAttention
from octavo.layers.elementwise import OPERATOR_OF, activation, addition
from octavo.layers.embedding import Embedding
from octavo.layers.heads import Heads
from octavo.layers.linear import ColumnLinear, QKVLinear, joined_linear
from octavo.layers.norm import LayerNorm
from octavo.models.config import DecoderConfig, even_share, refuse_quantization
from octavo.models.decoder import DecoderStack

ARCHITECTURES = ("GPT2LMHeadModel",)


class GPT2Config(DecoderConfig):
    """The keys have GPT-2's own names; the MLP is four times as wide as the stream unless `n_inner` is set."""

    @classmethod
    def read(cls, c: Checkpoint) -> Self:
        refuse_quantization(c)
        c.expect("scale_attn_weights", True)
        c.expect("scale_attn_by_inverse_layer_idx", False)
        c.expect("add_cross_attention", False)
        hidden_size, num_heads = c.positive("n_embd"), c.positive("n_head")
        return cls(
            num_layers=c.positive("n_layer"),
            hidden_size=hidden_size,
            intermediate_size=c.optional_positive("n_inner") or 4 * hidden_size,
            heads=Heads(num_heads, num_heads, even_share(c, "n_embd", hidden_size, num_heads)),
            vocab_size=c.positive("vocab_size"),
            max_positions=c.max_model_len(),
            norm_eps=c.float("layer_norm_epsilon", 1e-5),
            tied=c.bool("tie_word_embeddings", True),
            activation=c.expect("activation_function", *OPERATOR_OF, default="gelu_new"),
        )


class Attention(nn.Module):
    """Multi-head attention with biases."""

    def __init__(self, c: DecoderConfig, mesh: Mesh) -> None:
        super().__init__()
        self.c_attn = QKVLinear(c.hidden_size, c.heads, mesh, bias=True, reads=("c_attn",), transposed=True)
        self.attend = PagedAttention(self.c_attn.local_heads)
        self.c_proj = joined_linear(c.hidden_size, c.hidden_size, mesh, bias=True, transposed=True)

    def forward(self, x: Tensor, batch: ModelInput) -> Tensor:
        """x [tokens, hidden] → [tokens, hidden]."""
        q, k, v = self.c_attn(x)  # each [tokens, heads, dim]
        out: Tensor = self.c_proj(self.attend(q, k, v, batch))
        return out


class MLP(nn.Module):
    """`c_proj(gelu(c_fc(x)))`."""

    def __init__(self, c: DecoderConfig, mesh: Mesh) -> None:
        super().__init__()
        self.c_fc = ColumnLinear(c.hidden_size, c.intermediate_size, mesh, bias=True, transposed=True)
        self.act = activation(c.activation)
        self.c_proj = joined_linear(c.intermediate_size, c.hidden_size, mesh, bias=True, transposed=True)

    def forward(self, x: Tensor) -> Tensor:
        """x [tokens, hidden] → [tokens, hidden]."""
        out: Tensor = self.c_proj(self.act(self.c_fc(x)))
        return out


class Block(nn.Module):
    """Attention and MLP, each behind a norm."""

    def __init__(self, c: DecoderConfig, mesh: Mesh) -> None:
        super().__init__()
        self.ln_1 = LayerNorm(c.hidden_size, c.norm_eps)
        self.attn = Attention(c, mesh)
        self.ln_2 = LayerNorm(c.hidden_size, c.norm_eps)
        self.mlp = MLP(c, mesh)

    def forward(self, x: Tensor, residual: Tensor | None, batch: ModelInput) -> tuple[Tensor, Tensor]:
        """Return (x, residual), each [tokens, hidden]; the stream is their sum."""
        x, residual = self.ln_1.add(x, residual)
        x, residual = self.ln_2.add(self.attn(x, batch), residual)
        return self.mlp(x), residual


class GPT2LMHeadModel(DecoderStack):
    """The whole model."""

    Config = GPT2Config
    PREFIXES = ("transformer.",)
    RENAMED: ClassVar[Mapping[str, str]] = {
        "embed_tokens": "wte",
        "embed_positions": "wpe",
        "layers": "h",
        "norm": "ln_f",
    }
    # causal masks that old checkpoints carry along
    IGNORED = (r"h\.\d+\.attn\.(masked_)?bias",)
    FIRST_STAGE = ("embed_tokens", "embed_positions")

    def __init__(self, c: GPT2Config, mesh: Mesh) -> None:
        super().__init__(c, mesh, lambda _: Block(c, mesh), norm=LayerNorm)
        self.embed_positions = Embedding(c.max_positions, c.hidden_size) if self.is_first else None
        self.add = addition()

    def embed(self, x: Tensor, batch: ModelInput) -> Tensor:
        """Add the embeddings of positions to those of tokens."""
        assert self.embed_positions is not None, "only the first stage embeds positions"
        placed: Tensor = self.add(x, self.embed_positions(batch.positions))
        return placed


MODEL = GPT2LMHeadModel
