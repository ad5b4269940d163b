"""Families with mixtures whose routers choose by corrected scores, behind attention with keys and values."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from octavo.config.checkpoint import Checkpoint
from octavo.models.blocks import GatedDecoder, SandwichLayer, head_norms, width_norms
from octavo.models.config import read_windows, windows_by_kind
from octavo.models.fields import (
    BETWEEN,
    BIAS,
    EPS,
    HEAD_DIM,
    LING,
    MLP_BIAS,
    TIED,
    UNRELEASED,
    Read,
    chosen,
    fields,
    flag,
)
from octavo.models.sparse import (
    COUNTS,
    EITHER,
    NORMALIZED,
    NUMBERED,
    Mixture,
    corrected,
    dense_first,
    numbered_names,
    read_mixture,
    sparse_by_kind,
)

_NUM_EXPERTS: Final = fields(experts="num_experts", shared=("num_shared_experts", 0))


class AfmoeForCausalLM(GatedDecoder):
    """Trinity: gated attention with norms before and after, and no rotation in layers that see all tokens.

    Source: Arcee's releases.
    """

    RENAMED = BETWEEN
    REPLACED = {".mlp.router.gate.": ".mlp.gate."}
    EXPECTED = fields(score_func="sigmoid", n_group=1, route_norm=True)
    FIELDS = fields(
        mixture=Read(
            read_mixture,
            top_k=("num_experts_per_tok", 6),
            score="sigmoid",
            factor=("route_scale", 1.0),
            correction="expert_bias",
            **_NUM_EXPERTS,
        ),
        sparse=Read(dense_first, 1, "num_dense_layers"),
        norm_eps=EPS,
        bias=BIAS,
        qk_norms=head_norms,
        attention_gate="gate_proj",
        embedding_multiplier=Read(lambda c: c.positive("hidden_size") ** 0.5 if c.bool("mup_enabled", False) else 1.0),
        windows=Read(
            lambda c: read_windows(
                c, is_windowed=True, default=1024, pattern=c.positive("global_attn_every_n_layers", 4)
            )
        ),
        layer=SandwichLayer,
        turns_all=False,
    )


class BailingMoeForCausalLM(GatedDecoder):
    """Ling-lite and -plus: queries, keys and values are one tensor. Source: https://arxiv.org/abs/2503.05139."""

    RENAMED = LING
    REFUSED = {UNRELEASED: ("norm_head", "multi_gate")}
    FIELDS = fields(
        qkv_bias=flag("use_qkv_bias"),
        out_bias=flag("use_bias"),
        qkv_reads=(),
        mixture=Read(read_mixture, is_normalized=NORMALIZED[True], **COUNTS),
        sparse=Read(dense_first, 0),
    )


class BailingMoeV2ForCausalLM(GatedDecoder):
    """Ling 2.0, Ring 2.0 and Sarvam: Ling with the mixtures of DeepSeek V3.

    Sources: https://arxiv.org/abs/2510.22115, Sarvam's releases.
    """

    RENAMED = LING
    EXPECTED = fields(score_function="sigmoid", moe_router_enable_expert_bias=True, use_bias=False)
    FIELDS = fields(
        mixture=Read(corrected, factor=2.5, correction="gate.expert_bias", **COUNTS),
        rotary_share=1.0,
        qkv_bias=Read(lambda c: c.bool("use_qkv_bias", c.bool("attention_bias", False))),
        qkv_reads=(),
        qk_norms=chosen("use_qk_norm", True, head_norms),
        sparse=Read(dense_first, 1),
    )


SarvamMoEForCausalLM = BailingMoeV2ForCausalLM


def _of_totals(c: Checkpoint) -> Mixture:
    mixture = corrected(c, correction="gate.expert_bias", **COUNTS)
    stated = c.optional_positive("moe_shared_expert_intermediate_size") if mixture.shared_width else None
    return replace(mixture, shared_width=stated or mixture.shared_width)


class Param2MoEForCausalLM(BailingMoeV2ForCausalLM):
    """Param2: Ling 2.0's blocks; corrections are used around their mean, which changes no choice.

    Source: BharatGen's releases.
    """

    FIELDS = {
        **BailingMoeV2ForCausalLM.FIELDS,
        **fields(
            mixture=Read(_of_totals), qkv_bias=flag("use_qkv_bias"), qk_norms=chosen("use_qk_norm", False, head_norms)
        ),
    }


class Dots1ForCausalLM(GatedDecoder):
    """dots.llm1: Qwen3's attention, and DeepSeek V3's mixtures. Source: https://arxiv.org/abs/2506.05767."""

    FIELDS = fields(
        qk_norms=head_norms,
        bias=BIAS,
        windows=Read(lambda c: read_windows(c, is_windowed=c.values.get("max_window_layers") is not None)),
        mixture=Read(corrected, is_normalized=NORMALIZED[False]),
        sparse=Read(dense_first, 0),
    )


def _every_few(c: Checkpoint) -> tuple[bool, ...]:
    """Return which layers are mixtures: every so many between two of them."""
    layers, last = range(c.positive("num_hidden_layers")), c.int("moe_layer_end_index", -1)
    placed = range(c.int("moe_layer_start_index", 1), (len(layers) if last == -1 else last + 1))
    every = c.positive("moe_layer_interval", 1)
    return tuple(layer in placed and (layer + 1) % every == 0 for layer in layers)


class Ernie4_5_MoeForCausalLM(GatedDecoder):  # noqa: N801
    """ERNIE 4.5 with mixtures: the corrections of its routers are added to a softmax.

    Source: Baidu's releases.
    """

    REFUSED = {"experts with biases are not implemented": ("use_bias",)}
    EXPECTED = fields(moe_norm_min=1e-12)
    FIELDS = fields(
        mixture=Read(
            read_mixture,
            experts="moe_num_experts",
            top_k=("moe_k", ("num_experts_per_tok", 6)),
            shared=("moe_num_shared_experts", 2),
            correction="moe_statics.e_score_correction_bias",
            is_correction_row=True,
        ),
        sparse=Read(_every_few),
        interleaved=True,
        norm_eps=EPS,
        tied=TIED,
    )


class ExaoneMoeForCausalLM(GatedDecoder):
    """K-EXAONE: norms before attention and MLP, and on each head; layers that see all tokens do not rotate.

    Source: https://arxiv.org/abs/2601.01739.
    """

    FIELDS = fields(
        mixture=Read(corrected, factor=2.5, correction="e_score_correction_bias", **_NUM_EXPERTS),
        norm_eps=EPS,
        qk_norms=head_norms,
        windows=Read(read_windows, is_windowed=True, default=4096, pattern=4),
        sparse=Read(sparse_by_kind, 1),
        turns_all=False,
    )


ExaoneMoEForCausalLM = ExaoneMoeForCausalLM


class Glm4MoeForCausalLM(GatedDecoder):
    """GLM-4.5 to 4.7: half of each head turns, and mixtures stand behind the first layers.

    Source: https://arxiv.org/abs/2508.06471.
    """

    FIELDS = fields(
        rotary_share=0.5,
        norm_eps=EPS,
        qk_norms=chosen("use_qk_norm", False, head_norms),
        qkv_bias=BIAS,
        mixture=Read(corrected),
        sparse=Read(dense_first, 1),
    )


class HYV3ForCausalLM(GatedDecoder):
    """Hy3: Qwen3's attention, and mixtures chosen by corrected sigmoids. Source: Tencent's releases."""

    RENAMED = {"shared_experts": "shared_mlp"}
    REPLACED = {".mlp.router.gate.": ".mlp.gate."}
    FIELDS = fields(
        mixture=Read(
            read_mixture,
            score="sigmoid",
            factor=("router_scaling_factor", 2.826),
            correction="expert_bias",
            **_NUM_EXPERTS,
        ),
        norm_eps=EPS,
        qk_norms=head_norms,
        bias=BIAS,
        mlp_bias=MLP_BIAS,
        sparse=Read(sparse_by_kind, 1),
    )


class Kolibri1ForCausalLM(GatedDecoder):
    """Kolibri 1: norms before and after attention and mixtures, and on each head; corrections are added to logits.

    Layers that see all tokens do not rotate. Source: Aleph Alpha's releases.
    """

    RENAMED = {"attention_output_norm": "post_attn_norm", "mlp_output_norm": "post_ffn_norm"}
    REPLACED = {".moe.router.expert_bias": ".mlp.gate.expert_bias"}
    FIELDS = fields(
        windows=Read(windows_by_kind, 513),
        mixture=Read(
            read_mixture,
            **EITHER,
            score="sigmoid",
            corrects_logits=True,
            is_normalized=NORMALIZED[False],
            correction="gate.expert_bias",
            shared_width="shared_expert_intermediate_size",
        ),
        head_dim=HEAD_DIM,
        intermediate_size=Read(Checkpoint.positive, "moe_intermediate_size"),
        qk_norms=head_norms,
        layer=SandwichLayer,
        turns_all=False,
    )


def _rotary_share(c: Checkpoint) -> float:
    dim = c.positive("head_dim", 128)
    return (c.optional_positive("rotary_dim") or dim) / dim


class MiniMaxM2ForCausalLM(GatedDecoder):
    """MiniMax-M2: norms over all heads of queries and of keys, half of each head turns, and every layer is a mixture.

    Source: MiniMax's releases.
    """

    EXPECTED = fields(use_qk_norm=True, qk_norm_type="per_layer", scoring_func="sigmoid")
    FIELDS = fields(
        mixture=Read(
            read_mixture,
            NUMBERED,
            experts="num_local_experts",
            width="intermediate_size",
            score="sigmoid",
            correction="e_score_correction_bias",
        ),
        head_dim=HEAD_DIM,
        rotary_share=Read(_rotary_share),
        qk_norms=width_norms,
        renamed=Read(numbered_names),
    )


class SolarOpenForCausalLM(GatedDecoder):
    """Solar Open: Llama's attention, and a mixture chosen by corrected sigmoids in every layer.

    Source: Upstage's releases.
    """

    EXPECTED = fields(use_qk_norm=False)
    FIELDS = fields(
        rotary_share=1.0,
        norm_eps=EPS,
        qkv_bias=BIAS,
        intermediate_size=Read(Checkpoint.positive, "moe_intermediate_size"),
        mixture=Read(corrected),
        sparse=Read(dense_first, 0),
    )
