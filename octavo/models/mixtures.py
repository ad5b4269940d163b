"""Families whose MLPs are mixtures of experts, behind attention with keys and values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar

from octavo.config.checkpoint import Checkpoint
from octavo.layers.experts import StoredExperts
from octavo.layers.norm import LayerNorm
from octavo.models.blocks import GatedDecoder, LateNormLayer, head_norms, width_norms
from octavo.models.config import DecoderConfig, read_windows, turn_within_windows
from octavo.models.sparse import (
    Mixture,
    read_mixture,
    read_shared_mixture,
    read_stored,
    sparse_by_kind,
    sparse_layers,
)
from octavo.ops.experts import RouterRule


class GptOssForCausalLM(GatedDecoder):
    """gpt-oss: attention with sinks, a window in every other layer, and experts with biases and clamped gates.

    Source: https://arxiv.org/abs/2508.10925. Its releases hold the experts in MXFP4, which is refused by name:
    conversions to bfloat16 are read.
    """

    RENAMED: ClassVar[Mapping[str, str]] = {"gate": "router"}

    @classmethod
    def read(cls, c: Checkpoint) -> DecoderConfig:
        mixture = Mixture(
            experts=c.positive("num_local_experts"),
            width=c.positive("intermediate_size"),
            # softmax over the chosen ones alone
            rule=RouterRule(c.positive("num_experts_per_tok"), is_normalized=True),
            stored=read_stored(c, StoredExperts(is_stacked=True, is_transposed=True, is_interleaved=True)),
            router_bias=True,
            bias=True,
            activation="clamped_swiglu",
            numbers=(c.positive_float("swiglu_alpha", 1.702), c.positive_float("swiglu_limit", 7.0)),
        )
        return DecoderConfig.common(
            c,
            head_dim=c.positive("head_dim", 64),
            norm_eps=c.positive_float("rms_norm_eps", 1e-5),
            windows=read_windows(c, is_windowed=True),
            bias=c.bool("attention_bias", True),
            has_sinks=True,
            mixture=mixture,
        )


class HunYuanMoEV1ForCausalLM(GatedDecoder):
    """Hunyuan-A13B: heads are normalised after they turn, and a shared expert is as wide as the others.

    Source: Tencent's releases.
    """

    RENAMED: ClassVar[Mapping[str, str]] = {
        "gate": "gate.wg",
        "shared_experts": "shared_mlp",
        "q_norm": "query_layernorm",
        "k_norm": "key_layernorm",
    }

    @classmethod
    def read(cls, c: Checkpoint) -> DecoderConfig:
        width = c.positive("intermediate_size")
        mixture = Mixture(
            experts=c.positive("num_experts"),
            width=_of_all_layers(c, "moe_intermediate_size", width),
            rule=RouterRule(_of_all_layers(c, "moe_topk", c.positive("num_experts_per_tok", 1)), is_normalized=True),
            stored=read_stored(c),
            shared_width=width * _of_all_layers(c, "num_shared_expert", 1),
        )
        c.expect("use_cla", False, default=False)
        return DecoderConfig.common(
            c,
            norm_eps=c.positive_float("rms_norm_eps", 1e-5),
            bias=c.bool("attention_bias", False),
            qk_norms=head_norms,
            are_norms_last=True,
            mixture=mixture,
        )


def _of_all_layers(c: Checkpoint, name: str, default: int) -> int:
    """Return a number that the config may state for each layer. Raises CheckpointError where layers differ."""
    found = c.values.get(name)
    if not isinstance(found, list):
        return c.positive(name, default)
    if not found or not isinstance(found[0], int) or found[0] < 1 or any(each != found[0] for each in found):
        raise c.error(name, "one number above 0 for all layers")
    return found[0]


class MixtralForCausalLM(GatedDecoder):
    """Mixtral: Mistral with experts as wide as `intermediate_size`. Source: https://arxiv.org/abs/2401.04088."""

    @classmethod
    def read(cls, c: Checkpoint) -> DecoderConfig:
        mixture = Mixture(
            experts=c.positive("num_local_experts"),
            width=c.positive("intermediate_size"),
            rule=RouterRule(c.positive("num_experts_per_tok"), is_normalized=True),
            stored=read_stored(c, StoredExperts("w1", "w3", "w2")),
        )
        is_windowed = c.optional_positive("sliding_window") is not None
        eps = c.positive_float("rms_norm_eps", 1e-5)
        windows = read_windows(c, is_windowed=is_windowed)
        renamed = {"mlp": "mlp" if mixture.stored.is_stacked else "block_sparse_moe"}
        return DecoderConfig.common(c, norm_eps=eps, windows=windows, mixture=mixture, renamed=renamed)


class OlmoeForCausalLM(GatedDecoder):
    """OLMoE: Llama with norms over all heads of queries and of keys, and a mixture in every layer.

    Source: https://arxiv.org/abs/2409.02060.
    """

    @classmethod
    def read(cls, c: Checkpoint) -> DecoderConfig:
        c.expect("clip_qkv", None, default=None)
        eps = c.float("rms_norm_eps", 1e-5)
        mixture = Mixture(
            experts=c.positive("num_experts"),
            width=c.positive("intermediate_size"),
            rule=RouterRule(c.positive("num_experts_per_tok"), is_normalized=c.bool("norm_topk_prob", False)),
            stored=read_stored(c),
        )
        return DecoderConfig.common(
            c, norm_eps=eps, bias=c.bool("attention_bias", False), qk_norms=width_norms, mixture=mixture
        )


class DeepseekForCausalLM(GatedDecoder):
    """DeepSeekMoE: Llama with mixtures beside experts that all tokens take. Also the text model of DeepSeek-OCR.

    Sources: https://arxiv.org/abs/2401.06066, https://arxiv.org/abs/2510.18234, https://arxiv.org/abs/2601.20552.
    """

    @classmethod
    def read(cls, c: Checkpoint) -> DecoderConfig:
        c.expect("scoring_func", "softmax", default="softmax")
        c.expect("moe_layer_freq", 1, default=1)
        c.expect("topk_method", "greedy", default="greedy")
        rule = RouterRule(
            c.positive("num_experts_per_tok"),
            is_normalized=c.bool("norm_topk_prob", False),
            factor=c.positive_float("routed_scaling_factor", 1.0),
        )
        return DecoderConfig.common(
            c,
            bias=c.bool("attention_bias", False),
            mixture=read_mixture(c, rule),
            sparse=sparse_by_kind(c, 0),
        )


class FlintForCausalLM(GatedDecoder):
    """Flint: sinks and norms of heads, experts chosen by sigmoids beside one for all tokens; layers that see all tokens
    do not rotate. Source: RecursiveSI's releases.
    """

    RENAMED: ClassVar[Mapping[str, str]] = {"shared_experts": "shared_expert"}

    @classmethod
    def read(cls, c: Checkpoint) -> DecoderConfig:
        if c.values.get("layer_types") is None:
            raise c.error("layer_types", "the kind of each layer")
        mixture = read_shared_mixture(c, is_normalized=True)
        config = DecoderConfig.common(
            c,
            head_dim=c.positive("head_dim", 128),
            bias=c.bool("attention_bias", False),
            qk_norms=head_norms,
            windows=read_windows(c, is_windowed=False, default=513),
            has_sinks=True,
            mixture=replace(mixture, is_shared_gated=False, rule=replace(mixture.rule, score="sigmoid")),
            sparse=sparse_layers(c),
        )
        return turn_within_windows(config)

    def own_name(self, name: str) -> str:
        return name.replace(".softmax_offset", ".sinks")


class FlexOlmoForCausalLM(OlmoeForCausalLM):
    """FlexOlmo: OLMoE with OLMo 2's norms, behind attention and MLP. Source: https://arxiv.org/abs/2507.07024."""

    RENAMED: ClassVar[Mapping[str, str]] = {
        "attention_output_norm": "post_attention_layernorm",
        "mlp_output_norm": "post_feedforward_layernorm",
    }
    carries_residual = False

    @classmethod
    def read(cls, c: Checkpoint) -> DecoderConfig:
        eps = c.positive_float("rms_norm_eps", 1e-6)
        return replace(super().read(c), norm_eps=eps, layer=LateNormLayer)


class PhimoeForCausalLM(GatedDecoder):
    """Phi-3.5-MoE and Phi-mini-MoE: Mixtral with LayerNorms and biases, whose router weighs two experts one by one.

    Sources: https://arxiv.org/abs/2404.14219, https://arxiv.org/abs/2506.18349.
    """

    RENAMED: ClassVar[Mapping[str, str]] = {"mlp": "block_sparse_moe"}

    @classmethod
    def read(cls, c: Checkpoint) -> DecoderConfig:
        mixture = Mixture(
            experts=c.positive("num_local_experts", 16),
            width=c.positive("intermediate_size"),
            rule=RouterRule(c.expect("num_experts_per_tok", 2)),
            stored=StoredExperts("w1", "w3", "w2"),
            threshold=2 * c.float("router_jitter_noise", 0.01),
        )
        return DecoderConfig.common(
            c,
            norm=LayerNorm,
            norm_eps=c.positive_float("rms_norm_eps", 1e-5),
            bias=c.bool("attention_bias", False),
            head_bias=c.bool("lm_head_bias", False),
            windows=read_windows(c, is_windowed=c.values.get("sliding_window") is not None),
            mixture=mixture,
        )


PhiMoEForCausalLM = PhimoeForCausalLM


class Qwen2MoeForCausalLM(GatedDecoder):
    """Qwen2-MoE: Qwen2 with mixtures beside a gated expert that all tokens take.

    Source: https://qwenlm.github.io/blog/qwen-moe/.
    """

    RENAMED: ClassVar[Mapping[str, str]] = {"shared_experts": "shared_expert"}

    @classmethod
    def read(cls, c: Checkpoint) -> DecoderConfig:
        c.expect("use_sliding_window", False, default=False)
        return DecoderConfig.common(
            c,
            qkv_bias=c.bool("qkv_bias", True),
            windows=read_windows(c, is_windowed=False),
            mixture=read_shared_mixture(c, is_normalized=False),
            sparse=sparse_layers(c),
        )


class Qwen3MoeForCausalLM(GatedDecoder):
    """Qwen3-MoE: Qwen3 with mixtures of experts. Source: https://arxiv.org/abs/2505.09388."""

    @classmethod
    def read(cls, c: Checkpoint) -> DecoderConfig:
        mixture = Mixture(
            experts=c.positive("num_local_experts" if c.values.get("num_local_experts") else "num_experts"),
            width=c.positive("moe_intermediate_size"),
            rule=RouterRule(c.positive("num_experts_per_tok"), is_normalized=c.bool("norm_topk_prob", False)),
            stored=read_stored(c),
        )
        return DecoderConfig.common(
            c,
            head_dim=c.optional_positive("head_dim"),
            qk_norms=head_norms,
            bias=c.bool("attention_bias", False),
            windows=read_windows(c, is_windowed=c.bool("use_sliding_window", False)),
            mixture=mixture,
            sparse=sparse_layers(c),
        )


class MellumForCausalLM(Qwen3MoeForCausalLM):
    """Mellum 2: Qwen3-MoE with windows and rotations by kind of layer. Source: JetBrains' releases."""

    @classmethod
    def read(cls, c: Checkpoint) -> DecoderConfig:
        return replace(super().read(c), sparse=sparse_by_kind(c, 0))
