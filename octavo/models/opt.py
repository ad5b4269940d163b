"""OPT: learned positions, norms before or (350m) after the blocks. Source: https://arxiv.org/abs/2205.01068."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from octavo.attention.metadata import ModelInput
from octavo.config.checkpoint import Checkpoint
from octavo.distributed.mesh import Mesh
from octavo.layers.elementwise import OPERATOR_OF, addition
from octavo.layers.linear import ColumnLinear
from octavo.layers.norm import LayerNorm
from octavo.models.blocks import GatedDecoder, LateNormOfSumLayer, PlainMLP
from octavo.models.config import DecoderConfig


@dataclass(frozen=True, kw_only=True)
class OPTConfig(DecoderConfig):
    """Embeddings may be narrower than the layers; then projections connect them."""

    embedding_size: int
    final_norm: bool


class OPTForCausalLM(GatedDecoder):
    """The whole model."""

    PREFIXES = ("model.decoder.", "decoder.")
    RENAMED = {
        "norm": "final_layer_norm",
        "input_layernorm": "self_attn_layer_norm",
        "o_proj": "out_proj",
        "post_attention_layernorm": "final_layer_norm",
        "mlp": "",
        "up_proj": "fc1",
        "down_proj": "fc2",
    }
    # left over from the training framework
    IGNORED = ("version",)
    FIRST_STAGE = ("embed_tokens", "embed_positions", "project_in")
    LAST_STAGE = (*GatedDecoder.LAST_STAGE, "project_out")

    @classmethod
    def read(cls, c: Checkpoint) -> OPTConfig:
        c.expect("layer_norm_elementwise_affine", True)
        pre_norm = c.bool("do_layer_norm_before", True)
        bias = c.bool("enable_bias", True)
        return OPTConfig.common(
            c,
            intermediate_size=c.positive("ffn_dim"),
            rope=None,
            windows=(),
            norm=LayerNorm,
            position_offset=2,  # the rows before stand for padding
            norm_eps=1e-5,
            tied=c.bool("tie_word_embeddings", True),
            bias=bias,
            mlp_bias=bias,
            activation=c.expect("activation_function", *OPERATOR_OF, default="relu"),
            embedding_size=c.positive("word_embed_proj_dim", c.positive("hidden_size")),
            mlp=PlainMLP,
            layer=None if pre_norm else LateNormOfSumLayer,
            final_norm=pre_norm and not c.bool("_remove_final_layer_norm", False),
        )

    def __init__(self, c: OPTConfig, mesh: Mesh) -> None:
        super().__init__(c, mesh, embedding_size=c.embedding_size)
        narrow = c.embedding_size != c.hidden_size
        # so small that every rank has them whole
        self.project_in = (
            ColumnLinear(c.embedding_size, c.hidden_size, Mesh.single()) if narrow and self.is_first else None
        )
        self.project_out = (
            ColumnLinear(c.hidden_size, c.embedding_size, Mesh.single()) if narrow and self.is_last else None
        )
        self.add = addition()
        self.carries_residual = c.layer is None
        if not c.final_norm:
            self.norm = None

    def embed(self, x: Tensor, batch: ModelInput) -> Tensor:
        """Widen the embeddings where they are narrow, and add those of positions."""
        return super().embed(x if self.project_in is None else self.project_in(x), batch)

    def normalize(self, x: Tensor, residual: Tensor | None) -> Tensor:
        """Apply the final norm, which OPT-350m and some early checkpoints lack."""
        if self.norm is not None:
            return super().normalize(x, residual)
        return x if residual is None else self.add(x, residual)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Narrow the hidden states where the embeddings are narrow."""
        return super().compute_logits(hidden if self.project_out is None else self.project_out(hidden))
