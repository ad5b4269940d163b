"""Families whose MLPs are mixtures of experts, behind attention with keys and values."""

from __future__ import annotations

from copy import copy
from dataclasses import replace
from typing import Any, Final

from octavo.config.checkpoint import Checkpoint
from octavo.layers.experts import StoredExperts
from octavo.layers.norm import LayerNorm
from octavo.models.blocks import GatedDecoder, LateNormLayer, head_norms, width_norms
from octavo.models.config import read_windows, windows_by_kind
from octavo.models.fields import BEHIND, BIAS, EPS, HEAD_DIM, WHERE_STATED, WHERE_USED, Read, eps, fields, flag
from octavo.models.sparse import (
    EITHER,
    NORMALIZED,
    NUMBERED,
    ROUTED,
    Mixture,
    numbered_names,
    read_mixture,
    read_shared_mixture,
    sparse_by_kind,
    sparse_layers,
)


def _clamped(c: Checkpoint) -> Mixture:
    stacked = StoredExperts(is_stacked=True, is_transposed=True, is_interleaved=True)
    numbers = c.positive_float("swiglu_alpha", 1.702), c.positive_float("swiglu_limit", 7.0)
    own = fields(router_bias=True, bias=True, activation="clamped_swiglu", numbers=numbers)
    return read_mixture(c, stacked, experts="num_local_experts", width="intermediate_size", **own)


class AriaTextForCausalLM(GatedDecoder):
    """Aria's text model: Llama with a mixture in every layer, beside experts that all tokens take.

    Source: https://arxiv.org/abs/2410.05993.
    """

    RENAMED = {"gate": "router"}
    EXPECTED = fields(mlp_bias=False)
    FIELDS = fields(
        mixture=Read(
            read_mixture,
            experts=("moe_num_experts", 8),
            width="intermediate_size",
            top_k=("moe_topk", 2),
            shared=("moe_num_shared_experts", 2),
            stored=StoredExperts(is_stacked=True, is_transposed=True, stacks=("fc1.weight", "fc2.weight")),
        ),
        head_dim=HEAD_DIM,
        bias=BIAS,
    )


class GptOssForCausalLM(GatedDecoder):
    """gpt-oss: attention with sinks, a window in every other layer, and experts with biases and clamped gates.

    Source: https://arxiv.org/abs/2508.10925. Its releases hold the experts in MXFP4, which is refused by name:
    conversions to bfloat16 are read.
    """

    RENAMED = {"gate": "router"}
    FIELDS = fields(
        mixture=Read(_clamped),
        head_dim=Read(Checkpoint.positive, "head_dim", 64),
        norm_eps=EPS,
        windows=Read(read_windows, is_windowed=True),
        bias=flag("attention_bias", True),
        has_sinks=True,
    )


def _both_sides(c: Checkpoint) -> tuple[int, ...]:
    """Return the window of each layer, which is as long behind a token as before it."""
    return (c.positive("sliding_window", 128) + 1,) * c.positive("num_hidden_layers")


class OpenAIPrivacyFilterModel(GptOssForCausalLM):
    """OpenAI's privacy filter: gpt-oss whose layers all see a window to both sides, with labels for each token. Source:
    https://huggingface.co/openai/privacy-filter."""

    FIELDS = {
        **GptOssForCausalLM.FIELDS,
        "mixture": Read(lambda c: replace(_clamped(c), stored=StoredExperts(is_stacked=True, is_transposed=True))),
        "head_dim": Read(Checkpoint.optional_positive, "head_dim"),
        "windows": Read(_both_sides),
        "interleaved": True,
    }


_BY_LAYER: Final = ("moe_intermediate_size", "moe_topk", "num_shared_expert")
"""Numbers that configs of Hunyuan may state for each layer."""


def _shared_of_all_layers(c: Checkpoint) -> Mixture:
    """Read the mixture that all layers have. Raises CheckpointError where the config states others for some of them."""
    one = copy(c)
    one.values = {**c.values, **{name: _of_all_layers(c, name) for name in _BY_LAYER if name in c.values}}
    return read_mixture(
        one,
        experts="num_experts",
        width=("moe_intermediate_size", "intermediate_size"),
        top_k=("moe_topk", ("num_experts_per_tok", 1)),
        shared_width=c.positive("intermediate_size") * one.positive("num_shared_expert", 1),
    )


def _of_all_layers(c: Checkpoint, name: str) -> Any:
    found = c.values[name]
    if not isinstance(found, list):
        return found
    if not found or type(found[0]) is not int or any(each != found[0] for each in found):
        raise c.error(name, "one number above 0 for all layers")
    return found[0]


class HunYuanMoEV1ForCausalLM(GatedDecoder):
    """Hunyuan-A13B: heads are normalised after they turn, and a shared expert is as wide as the others.

    Source: Tencent's releases.
    """

    RENAMED = {
        "gate": "gate.wg",
        "shared_experts": "shared_mlp",
        "q_norm": "query_layernorm",
        "k_norm": "key_layernorm",
    }
    EXPECTED = fields(use_cla=False)
    FIELDS = fields(
        mixture=Read(_shared_of_all_layers), norm_eps=EPS, bias=BIAS, qk_norms=head_norms, are_norms_last=True
    )


class MixtralForCausalLM(GatedDecoder):
    """Mixtral: Mistral with experts as wide as `intermediate_size`. Source: https://arxiv.org/abs/2401.04088."""

    FIELDS = fields(
        mixture=Read(read_mixture, NUMBERED, experts="num_local_experts", width="intermediate_size"),
        norm_eps=EPS,
        windows=WHERE_STATED,
        renamed=Read(numbered_names),
    )


class OlmoeForCausalLM(GatedDecoder):
    """OLMoE: Llama with norms over all heads of queries and of keys, and a mixture in every layer.

    Source: https://arxiv.org/abs/2409.02060.
    """

    EXPECTED = fields(clip_qkv=None)
    FIELDS = fields(
        norm_eps=Read(Checkpoint.float, "rms_norm_eps", 1e-5),
        mixture=Read(read_mixture, experts="num_experts", width="intermediate_size", is_normalized=NORMALIZED[False]),
        bias=BIAS,
        qk_norms=width_norms,
    )


class DeepseekForCausalLM(GatedDecoder):
    """DeepSeekMoE: Llama with mixtures beside experts that all tokens take. Also the text model of DeepSeek-OCR.

    Sources: https://arxiv.org/abs/2401.06066, https://arxiv.org/abs/2510.18234, https://arxiv.org/abs/2601.20552.
    """

    EXPECTED = fields(scoring_func="softmax", moe_layer_freq=1, topk_method="greedy")
    FIELDS = fields(
        mixture=Read(read_mixture, is_normalized=NORMALIZED[False], **ROUTED), bias=BIAS, sparse=Read(sparse_by_kind, 0)
    )


class FlintForCausalLM(GatedDecoder):
    """Flint: sinks and norms of heads, experts chosen by sigmoids beside one for all tokens; layers that see all tokens
    do not rotate. Source: RecursiveSI's releases.
    """

    RENAMED = {"shared_experts": "shared_expert"}
    REPLACED = {".softmax_offset": ".sinks"}
    FIELDS = fields(
        windows=Read(windows_by_kind, 513),
        mixture=Read(read_shared_mixture, is_normalized=NORMALIZED[True], score="sigmoid", is_shared_gated=False),
        head_dim=HEAD_DIM,
        bias=BIAS,
        qk_norms=head_norms,
        has_sinks=True,
        sparse=Read(sparse_layers),
        turns_all=False,
    )


class FlexOlmoForCausalLM(OlmoeForCausalLM):
    """FlexOlmo: OLMoE with OLMo 2's norms, behind attention and MLP. Source: https://arxiv.org/abs/2507.07024."""

    RENAMED = BEHIND
    FIELDS = {**OlmoeForCausalLM.FIELDS, **fields(norm_eps=eps(default=1e-6), layer=LateNormLayer)}
    carries_residual = False


def _of_two(c: Checkpoint) -> Mixture:
    c.expect("num_experts_per_tok", 2)
    return read_mixture(
        c,
        experts=("num_local_experts", 16),
        width="intermediate_size",
        top_k=("num_experts_per_tok", 2),
        score="softmax_near",
        is_normalized=False,
        threshold=2 * c.float("router_jitter_noise", 0.01),
        stored=NUMBERED,
    )


class PhimoeForCausalLM(GatedDecoder):
    """Phi-3.5-MoE and Phi-mini-MoE: Mixtral with LayerNorms and biases, whose router weighs two experts one by one.

    Sources: https://arxiv.org/abs/2404.14219, https://arxiv.org/abs/2506.18349.
    """

    RENAMED = {"mlp": "block_sparse_moe"}
    FIELDS = fields(
        mixture=Read(_of_two),
        norm=LayerNorm,
        norm_eps=EPS,
        bias=BIAS,
        head_bias=flag("lm_head_bias"),
        windows=WHERE_STATED,
    )


PhiMoEForCausalLM = PhimoeForCausalLM


class Qwen2MoeForCausalLM(GatedDecoder):
    """Qwen2-MoE: Qwen2 with mixtures beside a gated expert that all tokens take.

    Source: https://qwenlm.github.io/blog/qwen-moe/.
    """

    RENAMED = {"shared_experts": "shared_expert"}
    EXPECTED = fields(use_sliding_window=False)
    FIELDS = fields(
        qkv_bias=flag("qkv_bias", True),
        windows=Read(read_windows, is_windowed=False),
        mixture=Read(read_shared_mixture, is_normalized=NORMALIZED[False]),
        sparse=Read(sparse_layers),
    )


class Qwen3MoeForCausalLM(GatedDecoder):
    """Qwen3-MoE: Qwen3 with mixtures of experts. Source: https://arxiv.org/abs/2505.09388."""

    FIELDS = fields(
        mixture=Read(read_mixture, **EITHER, is_normalized=NORMALIZED[False]),
        qk_norms=head_norms,
        bias=BIAS,
        windows=WHERE_USED,
        sparse=Read(sparse_layers),
    )


class MellumForCausalLM(Qwen3MoeForCausalLM):
    """Mellum 2: Qwen3-MoE with windows and rotations by kind of layer. Source: JetBrains' releases."""

    FIELDS = {**Qwen3MoeForCausalLM.FIELDS, "sparse": Read(sparse_by_kind, 0)}
