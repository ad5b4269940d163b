"""DBRX: mixtures of sixteen experts behind clamped queries, keys and values. Source: Databricks' releases."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from octavo.config.checkpoint import Checkpoint
from octavo.layers.experts import StoredExperts
from octavo.layers.norm import LayerNorm
from octavo.models.blocks import GatedDecoder
from octavo.models.config import DecoderConfig
from octavo.models.fields import fields
from octavo.models.sparse import read_mixture


class DbrxForCausalLM(GatedDecoder):
    """The whole model. Keys of `attn_config` and `ffn_config` stand beside the others here."""

    PREFIXES = ("transformer.",)
    RENAMED = {
        "embed_tokens": "wte",
        "layers": "blocks",
        "norm": "norm_f",
        "input_layernorm": "norm_attn_norm.norm_1",
        "self_attn": "norm_attn_norm.attn",
        "qkv_proj": "Wqkv",
        "o_proj": "out_proj",
        "post_attention_layernorm": "norm_attn_norm.norm_2",
        "mlp": "ffn",
        "gate": "router.layer",
        "experts": "experts.mlp",
    }

    @classmethod
    def read(cls, c: Checkpoint) -> DecoderConfig:
        c.expect("moe_normalize_expert_weights", 1.0, default=1.0)
        stored = StoredExperts("w1", "v1", "w2")  # as files of llama.cpp have them, one by one
        if c.gguf is None:
            stored = replace(stored, is_stacked=True, is_apart=True, is_flat=True)
        own = fields(experts=("moe_num_experts", 4), width=("intermediate_size", 3584), top_k=("moe_top_k", 1))
        mixture = read_mixture(c, stored=stored, **own)
        return DecoderConfig.common(
            c,
            intermediate_size=mixture.width,
            norm=partial(LayerNorm, bias=False),
            norm_eps=1e-5,
            qkv_reads=(),
            qkv_limit=None if c.values.get("clip_qkv") is None else c.positive_float("clip_qkv"),
            mixture=mixture,
        )
