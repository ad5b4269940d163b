"""Families with mixtures whose routers choose by corrected scores, behind attention with keys and values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from octavo.config.checkpoint import Checkpoint
from octavo.layers.experts import StoredExperts
from octavo.models.blocks import GatedDecoder, SandwichLayer, head_norms, width_norms
from octavo.models.config import DecoderConfig, read_windows, turn_within_windows
from octavo.models.sparse import (
    Mixture,
    corrected,
    dense_first,
    read_mixture,
    read_stored,
    sparse_by_kind,
    stated_counts,
)
from octavo.ops.experts import RouterRule


class AfmoeForCausalLM(GatedDecoder):
    """Trinity: gated attention with norms before and after, and no rotation in layers that see all tokens.

    Source: Arcee's releases.
    """

    RENAMED: ClassVar[Mapping[str, str]] = {
        "attention_output_norm": "post_attention_layernorm",
        "post_attention_layernorm": "pre_mlp_layernorm",
        "mlp_output_norm": "post_mlp_layernorm",
    }

    def own_name(self, name: str) -> str:
        return name.replace(".mlp.router.gate.", ".mlp.gate.")

    @classmethod
    def read(cls, c: Checkpoint) -> DecoderConfig:
        c.expect("score_func", "sigmoid")
        c.expect("n_group", 1)
        rule = RouterRule(
            c.positive("num_experts_per_tok", 6),
            "sigmoid",
            is_normalized=c.expect("route_norm", True),
            factor=c.positive_float("route_scale", 1.0),
        )
        dense, hidden = c.int("num_dense_layers", 1), c.positive("hidden_size")
        config = DecoderConfig.common(
            c,
            norm_eps=c.positive_float("rms_norm_eps", 1e-5),
            bias=c.bool("attention_bias", False),
            qk_norms=head_norms,
            attention_gate="gate_proj",
            embedding_multiplier=hidden**0.5 if c.bool("mup_enabled", False) else 1.0,
            windows=read_windows(
                c, is_windowed=True, default=1024, pattern=c.positive("global_attn_every_n_layers", 4)
            ),
            layer=SandwichLayer,
            mixture=read_mixture(c, rule, correction="expert_bias", counts=("num_experts", "num_shared_experts")),
            sparse=tuple(layer >= dense for layer in range(c.positive("num_hidden_layers"))),
        )
        return turn_within_windows(config)


class BailingMoeV2ForCausalLM(GatedDecoder):
    """Ling 2.0, Ring 2.0 and Sarvam: queries, keys and values are one tensor, and mixtures are those of DeepSeek V3.

    Sources: https://arxiv.org/abs/2510.22115, Sarvam's releases.
    """

    RENAMED: ClassVar[Mapping[str, str]] = {
        "embed_tokens": "word_embeddings",
        "self_attn": "attention",
        "qkv_proj": "query_key_value",
        "o_proj": "dense",
        "q_norm": "query_layernorm",
        "k_norm": "key_layernorm",
    }

    @classmethod
    def read(cls, c: Checkpoint) -> DecoderConfig:
        c.expect("score_function", "sigmoid")
        c.expect("moe_router_enable_expert_bias", True)
        c.expect("use_bias", False)
        mixture = corrected(c, factor=2.5, correction="gate.expert_bias", counts=stated_counts(c))
        return DecoderConfig.common(
            c,
            rotary_share=1.0,
            qkv_bias=c.bool("use_qkv_bias", c.bool("attention_bias", False)),
            qkv_reads=(),
            qk_norms=head_norms if c.bool("use_qk_norm", True) else None,
            mixture=mixture,
            sparse=dense_first(c, 1),
        )


SarvamMoEForCausalLM = BailingMoeV2ForCausalLM


class BailingMoeForCausalLM(GatedDecoder):
    """Ling-lite and -plus: Ling 2.0 whose routers choose by softmax. Source: https://arxiv.org/abs/2503.05139."""

    RENAMED = BailingMoeV2ForCausalLM.RENAMED

    @classmethod
    def read(cls, c: Checkpoint) -> DecoderConfig:
        c.refuse("norm_head", "multi_gate", because="no release has it, and it is not implemented")
        rule = RouterRule(c.positive("num_experts_per_tok"), is_normalized=c.bool("norm_topk_prob", True))
        return DecoderConfig.common(
            c,
            qkv_bias=c.bool("use_qkv_bias", False),
            out_bias=c.bool("use_bias", False),
            qkv_reads=(),
            mixture=read_mixture(c, rule, counts=stated_counts(c)),
            sparse=dense_first(c, 0),
        )


class Dots1ForCausalLM(GatedDecoder):
    """dots.llm1: Qwen3's attention, and DeepSeek V3's mixtures. Source: https://arxiv.org/abs/2506.05767."""

    @classmethod
    def read(cls, c: Checkpoint) -> DecoderConfig:
        return DecoderConfig.common(
            c,
            qk_norms=head_norms,
            bias=c.bool("attention_bias", False),
            windows=read_windows(c, is_windowed=c.values.get("max_window_layers") is not None),
            mixture=corrected(c, is_normalized=False),
            sparse=dense_first(c, 0),
        )


class Ernie4_5_MoeForCausalLM(GatedDecoder):  # noqa: N801
    """ERNIE 4.5 with mixtures: the corrections of its routers are added to a softmax.

    Source: Baidu's releases.
    """

    @classmethod
    def read(cls, c: Checkpoint) -> DecoderConfig:
        c.refuse("use_bias", because="experts with biases are not implemented")
        c.expect("moe_norm_min", 1e-12)
        width, last = c.positive("moe_intermediate_size"), c.int("moe_layer_end_index", -1)
        layers = range(c.positive("num_hidden_layers"))
        placed = range(c.int("moe_layer_start_index", 1), (len(layers) if last == -1 else last + 1))
        every = c.positive("moe_layer_interval", 1)
        mixture = Mixture(
            experts=c.positive("moe_num_experts"),
            width=width,
            rule=RouterRule(c.positive("moe_k", c.positive("num_experts_per_tok", 6)), is_normalized=True),
            stored=read_stored(c),
            correction="moe_statics.e_score_correction_bias",
            is_correction_row=True,
            shared_width=width * c.int("moe_num_shared_experts", 2),
        )
        return DecoderConfig.common(
            c,
            interleaved=True,
            norm_eps=c.positive_float("rms_norm_eps", 1e-5),
            tied=c.bool("tie_word_embeddings", True),
            mixture=mixture,
            sparse=tuple(layer in placed and (layer + 1) % every == 0 for layer in layers),
        )


class ExaoneMoeForCausalLM(GatedDecoder):
    """K-EXAONE: norms before attention and MLP, and on each head; layers that see all tokens do not rotate.

    Source: https://arxiv.org/abs/2601.01739.
    """

    @classmethod
    def read(cls, c: Checkpoint) -> DecoderConfig:
        mixture = corrected(
            c,
            factor=2.5,
            correction="e_score_correction_bias",
            counts=("num_experts", "num_shared_experts"),
        )
        config = DecoderConfig.common(
            c,
            norm_eps=c.positive_float("rms_norm_eps", 1e-5),
            qk_norms=head_norms,
            windows=read_windows(c, is_windowed=True, default=4096, pattern=4),
            mixture=mixture,
            sparse=sparse_by_kind(c, 1),
        )
        return turn_within_windows(config)


ExaoneMoEForCausalLM = ExaoneMoeForCausalLM


class Glm4MoeForCausalLM(GatedDecoder):
    """GLM-4.5 to 4.7: half of each head turns, and mixtures stand behind the first layers.

    Source: https://arxiv.org/abs/2508.06471.
    """

    @classmethod
    def read(cls, c: Checkpoint) -> DecoderConfig:
        return DecoderConfig.common(
            c,
            rotary_share=0.5,
            norm_eps=c.positive_float("rms_norm_eps", 1e-5),
            qk_norms=head_norms if c.bool("use_qk_norm", False) else None,
            qkv_bias=c.bool("attention_bias", False),
            mixture=corrected(c),
            sparse=dense_first(c, 1),
        )


class HYV3ForCausalLM(GatedDecoder):
    """Hy3: Qwen3's attention, and mixtures chosen by corrected sigmoids. Source: Tencent's releases."""

    RENAMED: ClassVar[Mapping[str, str]] = {"shared_experts": "shared_mlp"}

    def own_name(self, name: str) -> str:
        return name.replace(".mlp.router.gate.", ".mlp.gate.")

    @classmethod
    def read(cls, c: Checkpoint) -> DecoderConfig:
        rule = RouterRule(
            c.positive("num_experts_per_tok"),
            "sigmoid",
            is_normalized=True,
            factor=c.positive_float("router_scaling_factor", 2.826),
        )
        return DecoderConfig.common(
            c,
            norm_eps=c.positive_float("rms_norm_eps", 1e-5),
            qk_norms=head_norms,
            bias=c.bool("attention_bias", False),
            mlp_bias=c.bool("mlp_bias", False),
            mixture=read_mixture(c, rule, correction="expert_bias", counts=("num_experts", "num_shared_experts")),
            sparse=sparse_by_kind(c, 1),
        )


class Kolibri1ForCausalLM(GatedDecoder):
    """Kolibri 1: norms before and after attention and mixtures, and on each head; corrections are added to logits.

    Layers that see all tokens do not rotate. Source: Aleph Alpha's releases.
    """

    RENAMED: ClassVar[Mapping[str, str]] = {
        "attention_output_norm": "post_attn_norm",
        "mlp_output_norm": "post_ffn_norm",
    }

    @classmethod
    def read(cls, c: Checkpoint) -> DecoderConfig:
        if c.values.get("layer_types") is None:
            raise c.error("layer_types", "the kind of each layer")
        mixture = Mixture(
            experts=c.positive("num_local_experts" if c.values.get("num_local_experts") else "num_experts"),
            width=c.positive("moe_intermediate_size"),
            rule=RouterRule(
                c.positive("num_experts_per_tok"), "sigmoid", is_normalized=c.bool("norm_topk_prob", False)
            ),
            stored=read_stored(c),
            correction="gate.expert_bias",
            corrects_logits=True,
            shared_width=c.positive("shared_expert_intermediate_size"),
        )
        config = DecoderConfig.common(
            c,
            head_dim=c.positive("head_dim", 128),
            intermediate_size=mixture.width,
            qk_norms=head_norms,
            windows=read_windows(c, is_windowed=False, default=513),
            layer=SandwichLayer,
            mixture=mixture,
        )
        return turn_within_windows(config)

    def own_name(self, name: str) -> str:
        return name.replace(".moe.router.expert_bias", ".mlp.gate.expert_bias")


class MiniMaxM2ForCausalLM(GatedDecoder):
    """MiniMax-M2: norms over all heads of queries and of keys, half of each head turns, and every layer is a mixture.

    Source: MiniMax's releases.
    """

    @classmethod
    def read(cls, c: Checkpoint) -> DecoderConfig:
        c.expect("use_qk_norm", True)
        c.expect("qk_norm_type", "per_layer")
        c.expect("scoring_func", "sigmoid")
        mixture = Mixture(
            experts=c.positive("num_local_experts"),
            width=c.positive("intermediate_size"),
            rule=RouterRule(c.positive("num_experts_per_tok"), "sigmoid", is_normalized=True),
            stored=read_stored(c, StoredExperts("w1", "w3", "w2")),
            correction="e_score_correction_bias",
        )
        dim = c.positive("head_dim", 128)
        return DecoderConfig.common(
            c,
            head_dim=dim,
            rotary_share=(c.optional_positive("rotary_dim") or dim) / dim,
            qk_norms=width_norms,
            mixture=mixture,
            renamed={"mlp": "mlp" if mixture.stored.is_stacked else "block_sparse_moe"},
        )


class SolarOpenForCausalLM(GatedDecoder):
    """Solar Open: Llama's attention, and a mixture chosen by corrected sigmoids in every layer.

    Source: Upstage's releases.
    """

    @classmethod
    def read(cls, c: Checkpoint) -> DecoderConfig:
        c.expect("use_qk_norm", False, default=False)
        return DecoderConfig.common(
            c,
            rotary_share=1.0,
            norm_eps=c.positive_float("rms_norm_eps", 1e-5),
            qkv_bias=c.bool("attention_bias", False),
            intermediate_size=c.positive("moe_intermediate_size"),
            mixture=corrected(c),
            sparse=dense_first(c, 0),
        )
