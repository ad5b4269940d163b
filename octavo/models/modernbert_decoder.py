"""Decoders of ModernBERT's kind (Ettin): a window in two of three layers, and a dense layer and a norm before the head.

Source: https://arxiv.org/abs/2507.11412.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from torch import Tensor

from octavo.config.checkpoint import Checkpoint
from octavo.distributed.mesh import Mesh
from octavo.errors import UnsupportedModel
from octavo.layers.elementwise import OPERATOR_OF, activation
from octavo.layers.embedding import TokenBias
from octavo.layers.heads import Heads
from octavo.layers.linear import ColumnLinear
from octavo.layers.norm import LayerNorm
from octavo.models.blocks import GatedDecoder
from octavo.models.config import DecoderConfig, even_share
from octavo.models.encoder_parts import PreNormLayer, modern_ropes, modern_windows


@dataclass(frozen=True, kw_only=True)
class ModernBertDecoderConfig(DecoderConfig):
    """Before the head there are a dense layer, perhaps with a bias, the function `head_function`, and a norm."""

    head_function: str
    has_dense_bias: bool
    has_token_bias: bool
    """Whether a stored number is added to the logit of each token."""


class ModernBertDecoderForCausalLM(GatedDecoder):
    """The whole model. Its windows hold half of `local_attention`, the token itself included."""

    NAMES = {
        r"^(model\.)?embeddings\.tok_embeddings": "embed_tokens",
        r"^(model\.)?embeddings\.norm": "embed_norm",
        r"^(model\.)?final_norm": "norm",
        r"\.attn_norm\.": ".input_layernorm.",
        r"\.attn\.Wo": ".self_attn.o_proj",
        r"\.attn\.": ".self_attn.",
        r"\.mlp_norm\.": ".post_attention_layernorm.",
        r"\.mlp\.Wi": ".mlp.gate_up_proj",
        r"\.mlp\.Wo": ".mlp.down_proj",
        r"^lm_head\.dense": "head_dense",
        r"^lm_head\.norm": "head_norm",
        r"^decoder\.weight": "lm_head.weight",
        r"^decoder\.bias": "token_bias.bias",
    }
    LAST_STAGE = (*GatedDecoder.LAST_STAGE, "head_dense", "head_norm", "token_bias")

    @classmethod
    def read(cls, c: Checkpoint) -> ModernBertDecoderConfig:
        windows = modern_windows(c, max(c.positive("local_attention", 128) // 2, 1))
        hidden, count = c.positive("hidden_size"), c.positive("num_attention_heads")
        heads = Heads(count, count, even_share(c, "hidden_size", hidden, count))
        norm = partial(LayerNorm, bias=c.bool("norm_bias", False))
        return ModernBertDecoderConfig.common(
            c,
            heads=heads,
            rope=None,
            ropes=modern_ropes(c, heads.dim, windows),
            norm=norm,
            embedding_norm=norm,
            norm_eps=c.positive_float("norm_eps", 1e-5),
            tied=c.bool("tie_word_embeddings", True),
            bias=c.bool("attention_bias", False),
            mlp_bias=c.bool("mlp_bias", False),
            gate_up_reads=(),
            activation=c.expect("hidden_activation", "gelu"),
            windows=windows if any(windows) else (),
            layer=PreNormLayer,
            head_function=c.expect("classifier_activation", *OPERATOR_OF, default="gelu"),
            has_dense_bias=c.bool("classifier_bias", False),
            has_token_bias=c.bool("decoder_bias", True),
        )

    def __init__(self, c: ModernBertDecoderConfig, mesh: Mesh) -> None:
        super().__init__(c, mesh)
        if self.is_first:
            del self.layers["0"].input_layernorm
        self.token_bias = None
        if not self.is_last or not c.has_head:
            return
        # whole on every rank, as the hidden states are
        self.head_dense = ColumnLinear(c.hidden_size, c.hidden_size, Mesh.single(), bias=c.has_dense_bias)
        self.head_act, self.head_norm = activation(c.head_function), c.norm(c.hidden_size, c.norm_eps)
        self.token_bias = TokenBias(c.vocab_size, mesh) if c.has_token_bias else None

    def compute_logits(self, hidden: Tensor) -> Tensor:
        logits = super().compute_logits(self.head_norm(self.head_act(self.head_dense(hidden))))
        return logits if self.token_bias is None else self.token_bias(logits)

    def add_scores(self, num_labels: int, head: str = "classifier") -> None:
        raise UnsupportedModel(
            "decoders of ModernBERT with a head for labels are not implemented; convert embed makes vectors"
        )
