"""Decoders that know places by slopes of scores (ALiBi): BLOOM and MPT. Source: https://arxiv.org/abs/2108.12409."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from octavo.config.checkpoint import Checkpoint
from octavo.layers.distance import alibi_slopes
from octavo.layers.norm import LayerNorm
from octavo.models.blocks import GatedDecoder, PlainMLP
from octavo.models.config import DecoderConfig
from octavo.models.fields import TIED, Read, eps, fields


def _four_times(c: Checkpoint) -> int:
    return 4 * c.positive("hidden_size")


class BloomForCausalLM(GatedDecoder):
    """BLOOM: a norm of the embeddings, pre-norm blocks. Source: https://arxiv.org/abs/2211.05100."""

    PREFIXES = ("transformer.",)
    RENAMED = {
        "embed_tokens": "word_embeddings",
        "embed_norm": "word_embeddings_layernorm",
        "layers": "h",
        "norm": "ln_f",
        "self_attn": "self_attention",
        "o_proj": "dense",
        "up_proj": "dense_h_to_4h",
        "down_proj": "dense_4h_to_h",
    }
    EXPECTED = fields(apply_residual_connection_post_layernorm=False)
    FIELDS = fields(
        intermediate_size=Read(_four_times),
        rope=None,
        slopes=Read(lambda c: alibi_slopes(c.positive("num_attention_heads"))),
        norm=LayerNorm,
        embedding_norm=LayerNorm,
        norm_eps=eps("layer_norm_epsilon"),
        tied=TIED,
        bias=True,
        mlp_bias=True,
        qkv_reads=("query_key_value",),
        is_qkv_grouped=True,
        activation="gelu_pytorch_tanh",
        mlp=PlainMLP,
    )


class MptForCausalLM(GatedDecoder):
    """MPT: no biases, four times as wide MLPs. Source: https://www.databricks.com/blog/mpt-7b."""

    PREFIXES = ("transformer.",)
    RENAMED = {
        "embed_tokens": "wte",
        "layers": "blocks",
        "norm": "norm_f",
        "input_layernorm": "norm_1",
        "self_attn": "attn",
        "o_proj": "out_proj",
        "post_attention_layernorm": "norm_2",
        "mlp": "ffn",
    }

    EXPECTED = fields(no_bias=True)
    FIELDS = fields(
        intermediate_size=Read(_four_times),
        rope=None,
        norm=partial(LayerNorm, bias=False),
        norm_eps=eps("layer_norm_epsilon"),
        tied=TIED,
        qkv_reads=("Wqkv",),
        activation="gelu",
        mlp=PlainMLP,
    )

    @classmethod
    def read(cls, c: Checkpoint) -> DecoderConfig:
        config: DecoderConfig = super().read(c)
        c.refuse("logit_scale", because="factors of logits are not implemented")
        own = c.section("attn_config") or c
        own.expect("attn_type", "multihead_attention")
        own.expect("alibi", True)
        limit, scale = (
            None if own.values.get(name) is None else own.positive_float(name) for name in ("clip_qkv", "softmax_scale")
        )
        own.refuse("prefix_lm", "qk_ln", because="this variant of MPT is not implemented")
        slopes = alibi_slopes(config.heads.query, own.positive_float("alibi_bias_max", 8.0))
        return replace(config, slopes=slopes, attention_scale=scale, qkv_limit=limit)


MPTForCausalLM = MptForCausalLM
