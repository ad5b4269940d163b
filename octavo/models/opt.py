"""OPT: learned positions, norms before or (350m) after the blocks. Source: https://arxiv.org/abs/2205.01068."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
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

ARCHITECTURES = ("OPTForCausalLM",)

# positions 0 and 1 of the table stand for padding
_POSITION_OFFSET = 2


@dataclass(frozen=True, kw_only=True)
class OPTConfig(DecoderConfig):
    """Embeddings may be narrower than the layers; then projections connect them."""

    embedding_size: int
    pre_norm: bool
    final_norm: bool

    @classmethod
    def read(cls, c: Checkpoint) -> Self:
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
            qkv_bias=bias,
            out_bias=bias,
            mlp_bias=bias,
            activation=c.expect("activation_function", *OPERATOR_OF, default="relu"),
            embedding_size=c.positive("word_embed_proj_dim", hidden_size),
            pre_norm=pre_norm,
            final_norm=pre_norm and not c.bool("_remove_final_layer_norm", False),
        )


class Attention(nn.Module):
    """Multi-head attention."""

    def __init__(self, c: OPTConfig, mesh: Mesh) -> None:
        super().__init__()
        self.qkv_proj = QKVLinear(c.hidden_size, c.heads, mesh, bias=c.qkv_bias)
        self.attend = PagedAttention(self.qkv_proj.local_heads)
        self.out_proj = joined_linear(c.hidden_size, c.hidden_size, mesh, bias=c.out_bias)

    def forward(self, x: Tensor, batch: ModelInput) -> Tensor:
        """x [tokens, hidden] → [tokens, hidden]."""
        q, k, v = self.qkv_proj(x)  # each [tokens, heads, dim]
        out: Tensor = self.out_proj(self.attend(q, k, v, batch))
        return out


class DecoderLayer(nn.Module):
    """Attention and MLP, their norms before or after them."""

    def __init__(self, c: OPTConfig, mesh: Mesh) -> None:
        super().__init__()
        self.pre_norm = c.pre_norm
        self.self_attn = Attention(c, mesh)
        self.self_attn_layer_norm = LayerNorm(c.hidden_size, c.norm_eps)
        self.fc1 = ColumnLinear(c.hidden_size, c.intermediate_size, mesh, bias=c.mlp_bias)
        self.act = activation(c.activation)
        self.fc2 = joined_linear(c.intermediate_size, c.hidden_size, mesh, bias=c.mlp_bias)
        self.final_layer_norm = LayerNorm(c.hidden_size, c.norm_eps)

    def forward(self, x: Tensor, residual: Tensor | None, batch: ModelInput) -> tuple[Tensor, Tensor | None]:
        """Return (x, residual), each [tokens, hidden]; the stream is their sum, or x alone where norms come late."""
        if self.pre_norm:
            x, residual = self.self_attn_layer_norm.add(x, residual)
            x, residual = self.final_layer_norm.add(self.self_attn(x, batch), residual)
            return self.fc2(self.act(self.fc1(x))), residual
        x, _ = self.self_attn_layer_norm.add(self.self_attn(x, batch), x)
        x, _ = self.final_layer_norm.add(self.fc2(self.act(self.fc1(x))), x)
        return x, None


class OPTForCausalLM(DecoderStack):
    """The whole model."""

    Config = OPTConfig
    PREFIXES = ("model.decoder.", "decoder.")
    RENAMED: ClassVar[Mapping[str, str]] = {"norm": "final_layer_norm"}
    # left over from the training framework
    IGNORED = ("version",)
    FIRST_STAGE = ("embed_tokens", "embed_positions", "project_in")
    LAST_STAGE = ("norm", "project_out", "lm_head")

    def __init__(self, c: OPTConfig, mesh: Mesh) -> None:
        super().__init__(c, mesh, lambda _: DecoderLayer(c, mesh), norm=LayerNorm, embedding_size=c.embedding_size)
        narrow = c.embedding_size != c.hidden_size
        self.embed_positions = (
            Embedding(c.max_positions, c.hidden_size, offset=_POSITION_OFFSET) if self.is_first else None
        )
        # so small that every rank has them whole
        self.project_in = (
            ColumnLinear(c.embedding_size, c.hidden_size, Mesh.single()) if narrow and self.is_first else None
        )
        self.project_out = (
            ColumnLinear(c.hidden_size, c.embedding_size, Mesh.single()) if narrow and self.is_last else None
        )
        self.add = addition()
        self.carries_residual = c.pre_norm
        if not c.final_norm:
            self.norm = None

    def embed(self, x: Tensor, batch: ModelInput) -> Tensor:
        """Widen the embeddings where they are narrow, and add those of positions."""
        assert self.embed_positions is not None, "only the first stage embeds positions"
        if self.project_in is not None:
            x = self.project_in(x)
        placed: Tensor = self.add(x, self.embed_positions(batch.positions))
        return placed

    def normalize(self, x: Tensor, residual: Tensor | None) -> Tensor:
        """Apply the final norm, which OPT-350m and some early checkpoints lack."""
        if self.norm is not None:
            return super().normalize(x, residual)
        return x if residual is None else self.add(x, residual)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Narrow the hidden states where the embeddings are narrow."""
        return super().compute_logits(hidden if self.project_out is None else self.project_out(hidden))


MODEL = OPTForCausalLM
