"""GPT-2: learned positions, pre-norm blocks, weights stored [inputs, outputs].

Source: Radford et al., "Language Models are Unsupervised Multitask Learners".
"""

from __future__ import annotations

from typing import Self

from torch import Tensor, nn

from octavo.attention.metadata import ModelInput
from octavo.config.checkpoint import Checkpoint
from octavo.distributed.mesh import Mesh
from octavo.layers.activation import OPERATOR_OF, Activation
from octavo.layers.add import Add
from octavo.layers.attention import PagedAttention
from octavo.layers.embedding import Embedding, embedding_and_head
from octavo.layers.heads import Heads
from octavo.layers.linear import ColumnLinear, QKVLinear, RowLinear
from octavo.layers.norm import LayerNorm
from octavo.models.causal_lm import CausalLM
from octavo.models.config import DecoderConfig, even_share, refuse_quantization

ARCHITECTURES = ("GPT2LMHeadModel",)


class GPT2Config(DecoderConfig):
    """Keys of their own names; the MLP is four times as wide unless `n_inner` says otherwise."""

    @classmethod
    def read(cls, c: Checkpoint) -> Self:
        """See `ConfigReader.read`."""
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

    def __init__(self, c: DecoderConfig, mesh: Mesh, index: int) -> None:
        super().__init__()
        self.c_attn = QKVLinear(c.hidden_size, c.heads, mesh, bias=True, reads=("c_attn",), transposed=True)
        self.attend = PagedAttention(self.c_attn.local_heads, index)
        self.c_proj = RowLinear(c.hidden_size, c.hidden_size, mesh, bias=True, transposed=True)

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
        self.act = Activation(c.activation)
        self.c_proj = RowLinear(c.intermediate_size, c.hidden_size, mesh, bias=True, transposed=True)

    def forward(self, x: Tensor) -> Tensor:
        """x [tokens, hidden] → [tokens, hidden]."""
        out: Tensor = self.c_proj(self.act(self.c_fc(x)))
        return out


class Block(nn.Module):
    """Attention and MLP, each behind a norm."""

    def __init__(self, c: DecoderConfig, mesh: Mesh, index: int) -> None:
        super().__init__()
        self.ln_1 = LayerNorm(c.hidden_size, c.norm_eps)
        self.attn = Attention(c, mesh, index)
        self.ln_2 = LayerNorm(c.hidden_size, c.norm_eps)
        self.mlp = MLP(c, mesh)

    def forward(self, x: Tensor, residual: Tensor | None, batch: ModelInput) -> tuple[Tensor, Tensor]:
        """(x, residual), each [tokens, hidden]; the stream is their sum."""
        x, residual = self.ln_1.add(x, residual)
        x, residual = self.ln_2.add(self.attn(x, batch), residual)
        return self.mlp(x), residual


class GPT2LMHeadModel(CausalLM):
    """The whole model."""

    Config = GPT2Config
    PREFIXES = ("transformer.",)
    # causal masks that old checkpoints carry along
    IGNORED = (r"h\.\d+\.attn\.(masked_)?bias",)

    def __init__(self, c: GPT2Config, mesh: Mesh) -> None:
        super().__init__(c, mesh)
        self.wte, head = embedding_and_head(c.vocab_size, c.hidden_size, mesh, tied=c.tied)
        self.wpe = Embedding(c.max_positions, c.hidden_size)
        self.add = Add()
        self.h = nn.ModuleList(Block(c, mesh, index) for index in range(c.num_layers))
        self.ln_f = LayerNorm(c.hidden_size, c.norm_eps)
        self.lm_head = head

    def forward(self, batch: ModelInput) -> Tensor:
        """The normalised last hidden state of every token, [tokens, hidden]."""
        x, residual = self.add(self.wte(batch.token_ids), self.wpe(batch.positions)), None
        for block in self.h:
            x, residual = block(x, residual, batch)
        x, _ = self.ln_f.add(x, residual)
        return x

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """hidden [rows, hidden] → float32 [rows, vocabulary]."""
        logits: Tensor = self.lm_head(hidden)
        return logits


MODEL = GPT2LMHeadModel
