"""Cohere's families: Command R, R7B, A and A Plus."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from octavo.config.checkpoint import Checkpoint
from octavo.layers.norm import LayerNorm, RMSNorm
from octavo.models.blocks import GatedDecoder, ParallelLayer, head_layer_norms
from octavo.models.config import DecoderConfig, read_windows, windows_by_kind
from octavo.models.fields import BIAS, HEAD_DIM, TIED, Read, chosen, eps, fields
from octavo.models.sparse import NORMALIZED, Mixture, read_mixture, sparse_by_kind


class CohereForCausalLM(GatedDecoder):
    """Cohere's Command R: attention and MLP beside each other, behind one norm; heads turn in neighbouring pairs.

    In large models queries and keys have norms with weights for each head. Source: Cohere's releases.
    """

    FIELDS = fields(
        qk_norms=chosen("use_qk_norm", False, head_layer_norms),
        interleaved=True,
        norm=partial(LayerNorm, bias=False),
        norm_eps=eps("layer_norm_eps"),
        tied=TIED,
        bias=BIAS,
        logit_multiplier=Read(Checkpoint.float, "logit_scale", 0.0625),
        layer=ParallelLayer,
    )


class Cohere2ForCausalLM(CohereForCausalLM):
    """Command R7B and A: windows in three of four layers, and no rotation in the others.

    Source: https://arxiv.org/abs/2504.00698.
    """

    FIELDS = {
        **CohereForCausalLM.FIELDS,
        "qk_norms": None,
        "windows": Read(read_windows, is_windowed=True, default=4096, pattern=4),
        "turns_all": False,
    }


def _averaged(c: Checkpoint) -> Mixture:
    kind, shared = c.expect("expert_selection_fn", "softmax", "sigmoid"), c.count("num_shared_experts", 0)
    has_mean = c.expect("shared_expert_combination_strategy", "average", "sum") == "average"
    return read_mixture(
        c,
        experts=("num_experts", 8),
        width="intermediate_size",
        top_k=("num_experts_per_tok", 2),
        score=kind,
        is_normalized=kind == "softmax" or NORMALIZED[True],
        shared=shared,
        output_factor=0.5 if shared and has_mean else 1.0,
    )


def _dense_width(c: Checkpoint) -> int:
    return c.optional_positive("prefix_dense_intermediate_size") or c.positive("intermediate_size")


class Cohere2MoeForCausalLM(Cohere2ForCausalLM):
    """Command A Plus: Cohere 2 with mixtures, behind dense layers that may rotate although they see all tokens.

    Source: Cohere's releases.
    """

    FIELDS = {
        **Cohere2ForCausalLM.FIELDS,
        **fields(mixture=Read(_averaged), windows=Read(windows_by_kind, 4096), sparse=Read(sparse_by_kind, 0)),
        **fields(head_dim=HEAD_DIM, intermediate_size=Read(_dense_width)),
    }

    @classmethod
    def read(cls, c: Checkpoint) -> DecoderConfig:
        config: DecoderConfig = super().read(c)
        if c.values.get("rms_norm_eps") is not None:
            config = replace(config, norm=RMSNorm, norm_eps=c.positive_float("rms_norm_eps"))
        if c.positive("prefix_dense_sliding_window_pattern", 1) != 1:
            return config
        ropes = zip(config.ropes, config.sparse, strict=True)
        return replace(config, ropes=tuple(rope if each else config.rope for rope, each in ropes))
