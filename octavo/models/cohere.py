"""Cohere's families: Command R, R7B, A and A Plus."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from octavo.config.checkpoint import Checkpoint
from octavo.layers.norm import LayerNorm, RMSNorm
from octavo.models.blocks import GatedDecoder, ParallelLayer, head_layer_norms
from octavo.models.config import DecoderConfig, read_windows, turn_within_windows
from octavo.models.sparse import Mixture, read_stored, sparse_by_kind
from octavo.ops.experts import RouterRule


class CohereForCausalLM(GatedDecoder):
    """Cohere's Command R: attention and MLP beside each other, behind one norm; heads turn in neighbouring pairs.

    In large models queries and keys have norms with weights for each head. Source: Cohere's releases.
    """

    @classmethod
    def read(cls, c: Checkpoint) -> DecoderConfig:
        return cls._read(c, qk_norms=head_layer_norms if c.bool("use_qk_norm", False) else None)

    @staticmethod
    def _read(c: Checkpoint, **own: Any) -> DecoderConfig:
        fields: dict[str, Any] = {
            "interleaved": True,
            "norm": partial(LayerNorm, bias=False),
            "norm_eps": c.positive_float("layer_norm_eps", 1e-5),
            "tied": c.bool("tie_word_embeddings", True),
            "bias": c.bool("attention_bias", False),
            "logit_multiplier": c.float("logit_scale", 0.0625),
            "layer": ParallelLayer,
        }
        return DecoderConfig.common(c, **{**fields, **own})


class Cohere2ForCausalLM(CohereForCausalLM):
    """Command R7B and A: windows in three of four layers, and no rotation in the others.

    Source: https://arxiv.org/abs/2504.00698.
    """

    @classmethod
    def read(cls, c: Checkpoint) -> DecoderConfig:
        windows = read_windows(c, is_windowed=True, default=4096, pattern=4)
        return turn_within_windows(cls._read(c, windows=windows))


class Cohere2MoeForCausalLM(CohereForCausalLM):
    """Command A Plus: Cohere 2 with mixtures, behind dense layers that may rotate although they see all tokens.

    Source: Cohere's releases.
    """

    @classmethod
    def read(cls, c: Checkpoint) -> DecoderConfig:
        kind, width = c.expect("expert_selection_fn", "softmax", "sigmoid"), c.positive("intermediate_size")
        is_normalized = kind == "softmax" or c.bool("norm_topk_prob", True)
        shared = c.optional_positive("num_shared_experts") or 0
        has_mean = c.expect("shared_expert_combination_strategy", "average", "sum") == "average"
        mixture = Mixture(
            experts=c.positive("num_experts", 8),
            width=width,
            rule=RouterRule(c.positive("num_experts_per_tok", 2), kind, is_normalized=is_normalized),
            stored=read_stored(c),
            shared_width=shared * width,
            output_factor=0.5 if shared and has_mean else 1.0,
        )
        if c.values.get("layer_types") is None:
            raise c.error("layer_types", "the kind of each layer")
        sparse, own = sparse_by_kind(c, 0), dict[str, Any]()
        if c.values.get("rms_norm_eps") is not None:
            own = {"norm": RMSNorm, "norm_eps": c.positive_float("rms_norm_eps")}
        config = cls._read(
            c,
            head_dim=c.positive("head_dim", 128),
            intermediate_size=c.optional_positive("prefix_dense_intermediate_size") or width,
            windows=read_windows(c, is_windowed=False, default=4096),
            mixture=mixture,
            sparse=sparse,
            **own,
        )
        dense_turn = c.positive("prefix_dense_sliding_window_pattern", 1) == 1
        ropes = zip(turn_within_windows(config).ropes, sparse, strict=True)
        return replace(config, ropes=tuple(config.rope if dense_turn and not each else rope for rope, each in ropes))
