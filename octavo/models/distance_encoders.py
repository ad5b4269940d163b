"""Encoders that know the places of tokens by their distance: MPNet, JinaBERT v2, and DeBERTa v2 and v3."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from octavo.config.checkpoint import Checkpoint
from octavo.distributed.mesh import Mesh
from octavo.errors import ConfigError
from octavo.layers.disentangled import RelativePlaces
from octavo.layers.distance import BucketBiases, SlopeBiases
from octavo.layers.norm import WidthLayerNorm
from octavo.models.bert_encoder import BertEncoder
from octavo.models.config import DecoderConfig, NormPair
from octavo.models.encoder_parts import EncoderConfig, GateUpMLP, UpGateMLP

_BUCKETS = 32


class MPNetModel(BertEncoder):
    """MPNet: BERT with biases by distance, and positions that start behind those for padding. Source:
    https://arxiv.org/abs/2004.09297."""

    NAMES = {
        r"^mpnet\.": "",
        r"^encoder\.relative_attention_bias": "distance_biases",
        r"\.attention\.attn\.(q|k|v)\.": r".self_attn.\1.",
        r"\.attention\.attn\.o\.": ".self_attn.o_proj.",
        r"\.attention\.LayerNorm": ".input_layernorm",
        **BertEncoder.NAMES,
    }

    @classmethod
    def read(cls, c: Checkpoint, **own: Any) -> EncoderConfig:
        c.expect("relative_attention_num_buckets", _BUCKETS)
        if c.max_model_len() < 3:
            raise c.error("max_position_embeddings", "at least 3, of which two stand for padding")
        own |= {"position_offset": 2, "max_positions": c.max_model_len() - 2, "num_types": 0}
        biases = partial(BucketBiases, _BUCKETS, c.positive("num_attention_heads"))
        return super().read(c, qkv_reads=("q", "k", "v"), biases=biases, **own)


class JinaBertModel(BertEncoder):
    """JinaBERT v2: BERT with ALiBi to both sides in the place of positions, and gated MLPs. The release for code has
    norms of queries and keys, and gates behind what they gate. Source: https://arxiv.org/abs/2310.19923."""

    NAMES = {
        r"\.mlp\.gated_layers": ".mlp.gate_up_proj",
        r"\.mlp\.wo": ".mlp.down_proj",
        r"\.mlp\.layernorm|\.layer_norm_2": ".post_attention_layernorm",
        r"\.layer_norm_1": ".input_layernorm",
        r"\.mlp\.up_gated_layer": ".mlp.up_gate_proj",
        r"\.mlp\.down_layer": ".mlp.down_proj",
        r"\.attention\.self\.layer_norm_(q|k)\.": r".self_attn.\1_norm.",
        **BertEncoder.NAMES,
    }

    @classmethod
    def read(cls, c: Checkpoint, **own: Any) -> EncoderConfig:
        c.expect("feed_forward_type", "geglu")
        biases = partial(SlopeBiases, c.positive("num_attention_heads"), c.max_model_len())
        own |= {"mlp": GateUpMLP, "activation": "gelu"}
        if "qk-post-norm" in str(c.values.get("auto_map")):
            own |= {"mlp": UpGateMLP, "qk_norms": _width_norms}
        return super().read(c, position_offset=None, biases=biases, **own)


class DebertaV2Model(BertEncoder):
    """DeBERTa v2 and v3: BERT with learned vectors of distances. Source: https://arxiv.org/abs/2111.09543."""

    IGNORED = (*BertEncoder.IGNORED, r"(lm_predictions|mask_predictions)\..*")
    NAMES = {
        r"^deberta\.": "",
        r"^encoder\.rel_embeddings": "distance_biases.table",
        r"^encoder\.LayerNorm": "distance_biases.norm",
        r"\.attention\.self\.(query|key|value)_proj\.": r".self_attn.\1.",
        **BertEncoder.NAMES,
    }

    @classmethod
    def read(cls, c: Checkpoint, **own: Any) -> EncoderConfig:
        for name, value in {"relative_attention": True, "share_att_key": True, "position_biased_input": False}.items():
            c.expect(name, value, default=not value)
        c.expect("norm_rel_ebd", "layer_norm", default="none")
        c.expect("pos_att_type", "p2c|c2p", "c2p|p2c", ["p2c", "c2p"], ["c2p", "p2c"], default="none")
        c.expect("embedding_size", c.positive("hidden_size"))
        c.refuse("conv_kernel_size", because="a convolution beside the first layer is not implemented")
        longest = c.int("max_relative_positions", -1)
        longest = longest if longest > 0 else c.max_model_len()
        eps = c.positive_float("layer_norm_eps", 1e-7)
        sizes = c.positive("position_buckets"), longest, c.positive("hidden_size"), eps
        own |= {"position_offset": None, "num_types": c.count("type_vocab_size", 0), "norm_eps": eps}
        own["biases"] = lambda _: RelativePlaces(*sizes)  # all heads have the same
        own["head_function"] = c.expect("pooler_hidden_act", "gelu")
        config = super().read(c, **own)
        return replace(config, attention_scale=(3 * config.heads.dim) ** -0.5)


def _width_norms(c: DecoderConfig, mesh: Mesh) -> NormPair:
    """Make norms over all heads of a token together, which one rank has."""
    if mesh.tensor.size > 1:
        raise ConfigError(
            f"tensor_parallel_size is {mesh.tensor.size}, but norms go over all heads of a token in this model; use 1"
        )
    return WidthLayerNorm(c.hidden_size, c.norm_eps), WidthLayerNorm(c.hidden_size, c.norm_eps)
