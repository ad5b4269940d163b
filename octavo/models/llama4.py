"""Llama 4: most layers attend within chunks of the context, and each token takes one expert beside the shared one.

Source: Meta's releases.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from octavo.config.checkpoint import Checkpoint
from octavo.distributed.mesh import Mesh
from octavo.layers.experts import StoredExperts
from octavo.layers.rope import ProportionalScaling, QueryGrowth, Rope
from octavo.models.blocks import GatedDecoder, RotaryAttention, unscaled_head_norms
from octavo.models.config import DecoderConfig
from octavo.models.sparse import read_mixture


def _attention(c: DecoderConfig, mesh: Mesh, layer: int) -> RotaryAttention:
    return RotaryAttention(c if c.rope_of(layer) is c.rope else replace(c, qk_norms=None), mesh, layer)


class Llama4ForCausalLM(GatedDecoder):
    """The text model, for contexts within one chunk (`Checkpoint.dense_limit`), of which every layer sees all.

    Heads turn in neighbouring pairs and are normalised then, but for those of every fourth layer, whose queries grow.
    """

    RENAMED = {
        "mlp": "feed_forward",
        "gate": "router",
        "shared_experts": "shared_expert",
    }

    @classmethod
    def read(cls, c: Checkpoint) -> DecoderConfig:
        kinds, num_layers = c.values.get("layer_types") or [], c.positive("num_hidden_layers")
        if not isinstance(kinds, list) or any(each not in ("chunked_attention", "full_attention") for each in kinds):
            raise c.error("layer_types", '"chunked_attention" or "full_attention" for each layer')
        c.expect("num_experts_per_tok", 1)
        layers, step = range(num_layers), c.positive("interleave_moe_layer_step", 1)
        mixture = read_mixture(
            c,
            StoredExperts(is_transposed=True),
            experts=("num_local_experts", 16),
            width="intermediate_size",
            top_k=1,
            score="sigmoid",
            is_normalized=False,
            shared=1,
            are_inputs_weighted=True,
        )
        config = DecoderConfig.common(
            c,
            head_dim=c.positive("head_dim", 128),
            interleaved=True,
            intermediate_size=c.positive("intermediate_size_mlp", 16384),
            norm_eps=c.positive_float("rms_norm_eps", 1e-5),
            bias=c.bool("attention_bias", False),
            attention=_attention,
            qk_norms=unscaled_head_norms if c.bool("use_qk_norm", True) else None,
            are_norms_last=True,
            windows=(),
            mixture=mixture,
            sparse=tuple(each in _listed(c, "moe_layers", range(step - 1, num_layers, step)) for each in layers),
        )
        every = c.positive("no_rope_layer_interval", 4)
        turning = _listed(c, "no_rope_layers", [int((layer + 1) % every != 0) for layer in layers])
        if len(turning) != num_layers:
            raise c.error("no_rope_layers", f"a number for each of {num_layers} layers, 0 where heads do not turn")
        still = None
        if c.values.get("attn_temperature_tuning", True):
            growth = QueryGrowth(c.float("attn_scale", 0.1), c.positive("floor_scale", 8192), ahead=1)
            still = Rope(config.heads.dim, 1.0, ProportionalScaling(0), interleaved=True, query_growth=growth)
        return replace(config, ropes=tuple(config.rope if turns else still for turns in turning))


def _listed(c: Checkpoint, name: str, default: Any) -> Any:
    """Return a list of integers, `default` where it is absent or empty. Raises CheckpointError."""
    found = c.values.get(name) or default
    if found is not default and not (isinstance(found, list) and all(isinstance(each, int) for each in found)):
        raise c.error(name, "a list of integers")
    return found
