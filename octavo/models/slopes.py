"""Decoders that know places by slopes of scores (ALiBi): BLOOM, JAIS and MPT. Source: https://arxiv.org/abs/2108.12409."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from octavo.config.checkpoint import Checkpoint
from octavo.distributed.mesh import Mesh
from octavo.layers.distance import alibi_slopes
from octavo.layers.heads import Heads
from octavo.layers.linear import joined_linear
from octavo.layers.norm import LayerNorm
from octavo.models.blocks import GatedDecoder, GatedMLP, PlainMLP
from octavo.models.config import DecoderConfig, even_share
from octavo.models.fields import GPT2, TIED, Read, eps, fields


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


class _TransposedMLP(GatedMLP):
    """A gated MLP whose weights are stored [inputs, outputs]."""

    def __init__(self, c: DecoderConfig, mesh: Mesh) -> None:
        super().__init__(c, mesh)
        self.gate_up_proj.transposed = True
        self.down_proj = joined_linear(c.intermediate_size, c.hidden_size, mesh, bias=c.mlp_bias, transposed=True)


class JAISLMHeadModel(GatedDecoder):
    """JAIS: GPT-2 with slopes or learned positions, a gated MLP, and factors of scores, embeddings and logits (muP).

    Source: https://arxiv.org/abs/2308.16149.
    """

    PREFIXES = ("transformer.",)
    RENAMED = GPT2
    # tables that follow from the config
    IGNORED = (r"relative_pe\.slopes", r"h\.\d+\.attn\.(masked_)?bias")
    EXPECTED = fields(activation_function="swiglu", scale_attn_weights=True, add_cross_attention=False)

    @classmethod
    def read(cls, c: Checkpoint) -> DecoderConfig:
        c.expect_all(**cls.EXPECTED)
        c.refuse("alibi_scaling", "scale_attn_by_inverse_layer_idx", because="this variant of JAIS is not implemented")
        is_learned = c.expect("position_embedding_type", "learned", "alibi") == "learned"
        hidden, heads = c.positive("n_embd"), c.positive("n_head")
        dim = even_share(c, "n_embd", hidden, heads)
        by_dim = c.bool("scale_qk_dot_by_d", c.bool("mup_scale_qk_dot_by_d", False))
        logits = c.positive_float("mup_output_alpha", 1.0) * c.positive_float("mup_width_scale", 1.0)
        return DecoderConfig(
            num_layers=c.positive("n_layer"),
            hidden_size=hidden,
            intermediate_size=c.optional_positive("n_inner") or 4 * hidden,
            heads=Heads(heads, heads, dim),
            vocab_size=c.positive("vocab_size"),
            max_positions=c.max_model_len(),
            norm_eps=c.positive_float("layer_norm_epsilon", 1e-5),
            tied=c.bool("tie_word_embeddings", True),
            norm=LayerNorm,
            position_offset=0 if is_learned else None,
            slopes=() if is_learned else alibi_slopes(heads),
            attention_scale=dim ** -(1.0 if by_dim else 0.5),
            embedding_multiplier=c.positive_float("embeddings_scale", c.positive_float("mup_embeddings_scale", 1.0)),
            logit_multiplier=c.positive_float("width_scale", logits),
            qkv_bias=True,
            out_bias=True,
            mlp_bias=True,
            qkv_reads=(),
            gate_up_reads=("c_fc2", "c_fc"),
            is_transposed=True,
            mlp=_TransposedMLP,
        )
