"""GPT-2: learned positions, pre-norm blocks, weights stored [inputs, outputs].

Source: Radford et al., "Language Models are Unsupervised Multitask Learners".
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from torch import Tensor

from octavo.attention.metadata import ModelInput
from octavo.config.checkpoint import Checkpoint
from octavo.distributed.mesh import Mesh
from octavo.layers.elementwise import OPERATOR_OF, addition
from octavo.layers.embedding import Embedding
from octavo.layers.heads import Heads
from octavo.layers.norm import LayerNorm
from octavo.models.blocks import GatedDecoder, PlainMLP
from octavo.models.config import DecoderConfig, even_share


class GPT2LMHeadModel(GatedDecoder):
    """The keys have GPT-2's own names; the MLP is four times as wide as the stream unless `n_inner` is set."""

    PREFIXES = ("transformer.",)
    RENAMED: ClassVar[Mapping[str, str]] = {
        "embed_tokens": "wte",
        "embed_positions": "wpe",
        "layers": "h",
        "norm": "ln_f",
        "input_layernorm": "ln_1",
        "self_attn": "attn",
        "qkv_proj": "c_attn",
        "o_proj": "c_proj",
        "post_attention_layernorm": "ln_2",
        "up_proj": "c_fc",
        "down_proj": "c_proj",
    }
    # causal masks that old checkpoints carry along
    IGNORED = (r"h\.\d+\.attn\.(masked_)?bias",)
    FIRST_STAGE = ("embed_tokens", "embed_positions")

    @classmethod
    def read(cls, c: Checkpoint) -> DecoderConfig:
        c.expect("scale_attn_weights", True)
        c.expect("scale_attn_by_inverse_layer_idx", False)
        c.expect("add_cross_attention", False)
        hidden_size, num_heads = c.positive("n_embd"), c.positive("n_head")
        return DecoderConfig(
            num_layers=c.positive("n_layer"),
            hidden_size=hidden_size,
            intermediate_size=c.optional_positive("n_inner") or 4 * hidden_size,
            heads=Heads(num_heads, num_heads, even_share(c, "n_embd", hidden_size, num_heads)),
            vocab_size=c.positive("vocab_size"),
            max_positions=c.max_model_len(),
            norm_eps=c.positive_float("layer_norm_epsilon", 1e-5),
            tied=c.bool("tie_word_embeddings", True),
            norm=LayerNorm,
            qkv_bias=True,
            out_bias=True,
            mlp_bias=True,
            qkv_reads=(),
            is_transposed=True,
            mlp=PlainMLP,
            activation=c.expect("activation_function", *OPERATOR_OF, default="gelu_new"),
        )

    def __init__(self, c: DecoderConfig, mesh: Mesh) -> None:
        super().__init__(c, mesh)
        self.embed_positions = Embedding(c.max_positions, c.hidden_size) if self.is_first else None
        self.add = addition()

    def embed(self, x: Tensor, batch: ModelInput) -> Tensor:
        """Add the embeddings of positions to those of tokens."""
        assert self.embed_positions is not None, "only the first stage embeds positions"
        placed: Tensor = self.add(x, self.embed_positions(batch.positions))
        return placed
