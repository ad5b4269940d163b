"""Families of Llama's kind that transformers has no class for: their releases bring code of their own."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Final

from torch import nn

from octavo.config.checkpoint import Checkpoint
from octavo.distributed.mesh import Mesh
from octavo.layers.distance import alibi_slopes
from octavo.layers.embedding import UnitRowsHead
from octavo.layers.heads import Heads
from octavo.layers.linear import joined_linear
from octavo.layers.norm import RMSNorm
from octavo.models.blocks import GatedDecoder, GatedMLP, SandwichLayer, head_norms
from octavo.models.config import DecoderConfig, read_windows
from octavo.models.fields import BETWEEN, GPT2, HEAD_DIM, MLP_BIAS, TIED, Read, chosen, eps, fields, flag

_NORMALISED_VOCABULARY: Final = 125_696
"""Tokens of Baichuan 2, by which alone its configs differ from those of Baichuan 1."""


class BaichuanForCausalLM(GatedDecoder):
    """Baichuan 1 and 2: queries, keys and values are one tensor; 13B has slopes of scores in the place of rotations.

    Rows of Baichuan 2's head are divided by their lengths. Source: https://arxiv.org/abs/2309.10305.
    """

    FIELDS = fields(qkv_reads=("W_pack",))

    @classmethod
    def read(cls, c: Checkpoint) -> DecoderConfig:
        config: DecoderConfig = super().read(c)
        if not c.bool("alibi", False):
            return config
        return replace(config, rope=None, slopes=alibi_slopes(config.heads.query))

    def __init__(self, c: DecoderConfig, mesh: Mesh) -> None:
        super().__init__(c, mesh)
        if c.vocab_size == _NORMALISED_VOCABULARY and self.lm_head is not None:
            self.lm_head = UnitRowsHead(c.hidden_size, c.vocab_size, mesh)


def _chatglm_heads(c: Checkpoint) -> Heads:
    count, kv = c.positive("num_attention_heads"), "multi_query_group_num"
    shared = c.divisor(kv, "num_attention_heads", count, 1) if c.bool("multi_query_attention", False) else count
    return Heads(count, shared, c.positive("head_dim", 128))


class ChatGLMForCausalLM(GatedDecoder):
    """ChatGLM 2 and 3, and GLM-4 as it was first stored: half of each head turns, in neighbouring pairs.

    Source: https://arxiv.org/abs/2406.12793.
    """

    PREFIXES = ("transformer.encoder.", "transformer.")
    REPLACED = {".word_embeddings.": "."}
    RENAMED = {
        "embed_tokens": "embedding",
        "norm": "final_layernorm",
        "lm_head": "output_layer",
        "self_attn": "self_attention",
        "o_proj": "dense",
        "gate_up_proj": "dense_h_to_4h",
        "down_proj": "dense_4h_to_h",
    }
    IGNORED = (*GatedDecoder.IGNORED, r"rotary_pos_emb\.inv_freq")
    EXPECTED = fields(
        rmsnorm=True, post_layer_norm=True, apply_residual_connection_post_layernorm=False, interleaved_qkv=False
    )
    FIELDS = fields(
        heads=Read(_chatglm_heads),
        rotary_share=0.5,
        interleaved=flag("original_rope", True),
        norm_eps=eps("layernorm_epsilon"),
        qkv_bias=Read(lambda c: c.bool("add_bias_linear", False) or c.bool("add_qkv_bias", False)),
        out_bias=flag("add_bias_linear"),
        mlp_bias=flag("add_bias_linear"),
        qkv_reads=("query_key_value",),
        gate_up_reads=(),
    )

    @classmethod
    def read(cls, c: Checkpoint) -> DecoderConfig:
        c.refuse("position_encoding_2d", "inner_hidden_size", because="ChatGLM 1 is not implemented; take a later one")
        c.refuse("vision_config", because="GLM-4V is not implemented in this layout; take zai-org/GLM-4.1V-9B-Thinking")
        c.refuse("quantization_bit", "pre_seq_len", because="weights of this kind are not implemented")
        config: DecoderConfig = super().read(c)
        assert config.rope is not None, "the family has a rotation"
        return replace(config, rope=replace(config.rope, theta=1e4 * c.positive_float("rope_ratio", 1.0)))


class InternLMForCausalLM(GatedDecoder):
    """InternLM 1 and openPangu-Embedded: Llama with biases around attention.

    Source: https://github.com/InternLM/InternLM.
    """

    FIELDS = fields(bias=flag("bias", True), mlp_bias=MLP_BIAS)

    @classmethod
    def read(cls, c: Checkpoint) -> DecoderConfig:
        c.refuse("kv_lora_rank", "n_routed_experts", "param_sink_number", because="this openPangu is not implemented")
        c.refuse("interleaved_sliding_window", because="windows of openPangu are not implemented")
        config: DecoderConfig = super().read(c)
        own = c.part("rotary")  # of InternLM 1; dynamic scaling begins behind the longest context
        own.expect("type", "origin", "dynamic")
        if config.rope is not None and own.values.get("base") is not None:
            config = replace(config, rope=replace(config.rope, theta=own.positive_float("base")))
        return replace(config, qkv_bias=c.bool("qkv_bias", config.qkv_bias))


class PanguEmbeddedForCausalLM(InternLMForCausalLM):
    """openPangu-Embedded: InternLM 1, in larger models with norms before and after attention and MLP.

    Source: Huawei's releases.
    """

    RENAMED = BETWEEN
    FIELDS = fields(
        **{**InternLMForCausalLM.FIELDS, "bias": Read(lambda c: c.bool("attention_bias", c.bool("bias", False)))},
        layer=chosen("sandwich_norm", False, SandwichLayer),
    )

    @classmethod
    def read(cls, c: Checkpoint) -> DecoderConfig:
        config = super().read(c)
        return config if config.layer is SandwichLayer else replace(config, renamed={})


class _Plamo3Layer(SandwichLayer):
    """Weights of the norms behind attention and MLP are stored without numbers of their own, both below one."""

    def __init__(self, c: DecoderConfig, attention: nn.Module, mlp: nn.Module) -> None:
        super().__init__(c, attention, mlp)
        self.attention_output_norm = RMSNorm(c.hidden_size, c.norm_eps, offset=1 / 5)
        self.mlp_output_norm = RMSNorm(c.hidden_size, c.norm_eps, offset=5**-1.5)


class Plamo3ForCausalLM(GatedDecoder):
    """PLaMo 3: norms before and behind attention and MLP; windows, and another rotation, in seven of eight layers.

    Source: Preferred Networks' releases.
    """

    PREFIXES = ("model.layers.", "model.")
    RENAMED = {
        "input_layernorm": "pre_mixer_norm",
        "self_attn": "mixer",
        "attention_output_norm": "post_mixer_norm",
        "post_attention_layernorm": "pre_mlp_norm",
        "mlp_output_norm": "post_mlp_norm",
    }
    EXPECTED = fields(hidden_activation="swiglu")
    REFUSED = {
        "factors of embeddings are not implemented": ("scale_embedding",),
        "biases of attention are not implemented": ("attention_bias",),
    }
    FIELDS = fields(
        windows=Read(read_windows, is_windowed=True, default=128, pattern=8),
        head_dim=HEAD_DIM,
        tied=TIED,
        norm_eps=eps(default=1e-6),
        norm=partial(RMSNorm, offset=1.0),
        qk_norms=head_norms,
        qkv_reads=(),
        gate_up_reads=(),
        layer=_Plamo3Layer,
    )


class QWenLMHeadModel(GatedDecoder):
    """Qwen 1: biased queries, keys and values in one tensor, an MLP half as wide as its config says.

    Positions behind the training's, where releases stretch rotations and scale queries, are not served.
    Source: https://arxiv.org/abs/2309.16609.
    """

    PREFIXES = ("transformer.",)
    RENAMED = GPT2
    EXPECTED = fields(scale_attn_weights=True)
    FIELDS = fields(
        intermediate_size=Read(lambda c: c.positive("intermediate_size") // 2),
        rotary_share=1.0,
        norm_eps=eps("layer_norm_epsilon", 1e-6),
        qkv_bias=True,
        out_bias=Read(lambda c: not c.bool("no_bias", True)),
        mlp_bias=Read(lambda c: not c.bool("no_bias", True)),
        qkv_reads=(),
        gate_up_reads=("w2", "w1"),
    )


class _TeleChatMLP(GatedMLP):
    """A gated MLP with a bias behind it alone."""

    def __init__(self, c: DecoderConfig, mesh: Mesh) -> None:
        super().__init__(c, mesh)
        self.down_proj = joined_linear(c.intermediate_size, c.hidden_size, mesh, bias=True)


class TeleChatForCausalLM(GatedDecoder):
    """TeleChat 1 and 2: keys and values are one tensor, head by head; biases are behind attention and MLP alone.

    Source: https://arxiv.org/abs/2401.03804.
    """

    PREFIXES = ("transformer.",)
    RENAMED = {
        "embed_tokens": "word_embeddings",
        "layers": "h",
        "norm": "ln_f",
        "self_attn": "self_attention",
        "o_proj": "dense",
    }
    EXPECTED = fields(embed_layernorm=False, apply_residual_connection_post_layernorm=False)
    FIELDS = fields(
        norm_eps=eps("layer_norm_epsilon"),
        qkv_reads=("query", "key_value"),
        is_qkv_grouped=True,
        out_bias=True,
        mlp=_TeleChatMLP,
    )

    @classmethod
    def read(cls, c: Checkpoint) -> DecoderConfig:
        if c.values.get("training_seqlen") is not None:  # else rotations are stretched
            c.expect("base_seqlen", c.positive("training_seqlen"))
        return super().read(c)


class TeleFLMForCausalLM(GatedDecoder):
    """Tele-FLM: Llama with factors of embeddings and logits. Source: https://arxiv.org/abs/2404.16645."""

    @classmethod
    def read(cls, c: Checkpoint) -> DecoderConfig:
        config: DecoderConfig = super().read(c)
        if not c.bool("use_mup", False):
            return config
        output = c.positive_float("output_mult") / c.positive_float("mup_scale_factor")
        return replace(config, embedding_multiplier=c.positive_float("input_mult", 1.0), logit_multiplier=output)
