"""OPT: learned positions, norms before or (350m) after the blocks. Source: https://arxiv.org/abs/2205.01068."""

from __future__ import annotations

from dataclasses import dataclass
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

ARCHITECTURES = ("OPTForCausalLM",)

# positions 0 and 1 of the table stand for padding
_POSITION_OFFSET = 2


@dataclass(frozen=True, kw_only=True)
class OPTConfig(DecoderConfig):
    """Embeddings may be narrower than the blocks; then projections lead in and out."""

    embedding_size: int
    pre_norm: bool
    final_norm: bool

    @classmethod
    def read(cls, c: Checkpoint) -> Self:
        """See `ConfigReader.read`."""
        refuse_quantization(c)
        c.expect("layer_norm_elementwise_affine", True)
        hidden_size, num_heads = c.positive("hidden_size"), c.positive("num_attention_heads")
        pre_norm = c.bool("do_layer_norm_before", True)
        bias = c.bool("enable_bias", True)
        return cls(
            num_layers=c.positive("num_hidden_layers"),
            hidden_size=hidden_size,
            intermediate_size=c.positive("ffn_dim"),
            heads=Heads(num_heads, num_heads, even_share(c, "hidden_size", hidden_size, num_heads)),
            vocab_size=c.positive("vocab_size"),
            max_positions=c.max_model_len(),
            norm_eps=1e-5,
            tied=c.bool("tie_word_embeddings", True),
            attention_bias=bias,
            mlp_bias=bias,
            activation=c.expect("activation_function", *OPERATOR_OF, default="relu"),
            embedding_size=c.positive("word_embed_proj_dim", hidden_size),
            pre_norm=pre_norm,
            final_norm=pre_norm and not c.bool("_remove_final_layer_norm", False),
        )


class Attention(nn.Module):
    """Multi-head attention."""

    def __init__(self, c: OPTConfig, mesh: Mesh, index: int) -> None:
        super().__init__()
        self.qkv_proj = QKVLinear(c.hidden_size, c.heads, mesh, bias=c.attention_bias)
        self.attend = PagedAttention(self.qkv_proj.local_heads, index)
        self.out_proj = RowLinear(c.hidden_size, c.hidden_size, mesh, bias=c.attention_bias)

    def forward(self, x: Tensor, batch: ModelInput) -> Tensor:
        """x [tokens, hidden] → [tokens, hidden]."""
        q, k, v = self.qkv_proj(x)  # each [tokens, heads, dim]
        out: Tensor = self.out_proj(self.attend(q, k, v, batch))
        return out


class DecoderLayer(nn.Module):
    """Attention and MLP, their norms before or after them."""

    def __init__(self, c: OPTConfig, mesh: Mesh, index: int) -> None:
        super().__init__()
        self.pre_norm = c.pre_norm
        self.self_attn = Attention(c, mesh, index)
        self.self_attn_layer_norm = LayerNorm(c.hidden_size, c.norm_eps)
        self.fc1 = ColumnLinear(c.hidden_size, c.intermediate_size, mesh, bias=c.mlp_bias)
        self.act = Activation(c.activation)
        self.fc2 = RowLinear(c.intermediate_size, c.hidden_size, mesh, bias=c.mlp_bias)
        self.final_layer_norm = LayerNorm(c.hidden_size, c.norm_eps)

    def forward(self, x: Tensor, residual: Tensor | None, batch: ModelInput) -> tuple[Tensor, Tensor | None]:
        """(x, residual), each [tokens, hidden]; before the norms their sum is the stream, after them x alone."""
        if self.pre_norm:
            x, residual = self.self_attn_layer_norm.add(x, residual)
            x, residual = self.final_layer_norm.add(self.self_attn(x, batch), residual)
            return self.fc2(self.act(self.fc1(x))), residual
        x, _ = self.self_attn_layer_norm.add(self.self_attn(x, batch), x)
        x, _ = self.final_layer_norm.add(self.fc2(self.act(self.fc1(x))), x)
        return x, None


class OPTForCausalLM(CausalLM):
    """The whole model."""

    Config = OPTConfig
    PREFIXES = ("model.decoder.", "decoder.")
    # left over from the training framework
    IGNORED = ("version",)

    def __init__(self, c: OPTConfig, mesh: Mesh) -> None:
        super().__init__(c, mesh)
        narrow = c.embedding_size != c.hidden_size
        self.embed_tokens, head = embedding_and_head(c.vocab_size, c.embedding_size, mesh, tied=c.tied)
        self.embed_positions = Embedding(c.max_positions, c.hidden_size, offset=_POSITION_OFFSET)
        self.project_in = ColumnLinear(c.embedding_size, c.hidden_size, mesh) if narrow else None
        self.add = Add()
        self.layers = nn.ModuleList(DecoderLayer(c, mesh, index) for index in range(c.num_layers))
        self.final_layer_norm = LayerNorm(c.hidden_size, c.norm_eps) if c.final_norm else None
        self.project_out = ColumnLinear(c.hidden_size, c.embedding_size, mesh) if narrow else None
        self.lm_head = head

    def forward(self, batch: ModelInput) -> Tensor:
        """The last hidden state of every token, [tokens, hidden]."""
        x: Tensor = self.embed_tokens(batch.token_ids)
        if self.project_in is not None:
            x = self.project_in(x)
        x, residual = self.add(x, self.embed_positions(batch.positions)), None
        for layer in self.layers:
            x, residual = layer(x, residual, batch)
        if self.final_layer_norm is not None:
            x, _ = self.final_layer_norm.add(x, residual)
        elif residual is not None:
            x = self.add(x, residual)
        return x

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """hidden [rows, hidden] → float32 [rows, vocabulary]."""
        if self.project_out is not None:
            hidden = self.project_out(hidden)
        logits: Tensor = self.lm_head(hidden)
        return logits


MODEL = OPTForCausalLM
