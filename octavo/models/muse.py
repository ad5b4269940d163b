"""Muse Glimmer: gated attention between norms, windows in three of four layers, and no rotation in the others."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from octavo.config.checkpoint import Checkpoint
from octavo.distributed.mesh import Mesh
from octavo.layers.norm import RMSNorm, UnscaledRMSNorm
from octavo.models.blocks import GatedDecoder, SandwichLayer, unscaled_head_norms
from octavo.models.config import DecoderConfig
from octavo.models.fields import BY_KIND, EPS, HEAD_DIM, Read, fields
from octavo.models.gemma_parts import BETWEEN_NORMS
from octavo.models.ropes import ropes_by_layer


def _layer(c: Checkpoint) -> partial[SandwichLayer]:
    eps = c.positive_float("post_norm_eps", 1e-8)
    return partial(SandwichLayer, after=lambda c: c.norm(c.hidden_size, eps))


class MuseGlimmerForCausalLM(GatedDecoder):
    """Embeddings and heads have norms without weights, and logits a soft cap.

    `layer_rope_theta` has 0 for a layer that does not rotate. Source: Meta's releases.
    """

    RENAMED = BETWEEN_NORMS
    keeps_vectors = True
    EXPECTED = fields(hidden_activation="silu", attention_bias=False)
    FIELDS = fields(
        activation="silu",
        windows=BY_KIND,
        norm_eps=EPS,
        head_dim=HEAD_DIM,
        norm=partial(RMSNorm, offset=1.0),
        embedding_norm=UnscaledRMSNorm,
        qk_norms=unscaled_head_norms,
        attention_gate="gate_proj",
        attention_scale=Read(lambda c: c.positive_float("qk_scale_factor", 3.87) * c.positive("head_dim", 128) ** -0.5),
        logit_multiplier=Read(Checkpoint.positive_float, "output_multiplier", 0.19611613513818404),
        logit_soft_cap=Read(Checkpoint.positive_float, "final_logit_softcapping", 20.0),
        layer=Read(_layer),
    )

    @classmethod
    def read(cls, c: Checkpoint) -> DecoderConfig:
        config: DecoderConfig = super().read(c)
        assert config.rope is not None, "the family has a rotation"
        if c.values.get("layer_rope_theta") is None:
            turns = [(config.num_layers - 1 - layer) % 4 != 0 for layer in range(config.num_layers)]
            return replace(config, ropes=tuple(config.rope if each else None for each in turns))
        return replace(config, ropes=ropes_by_layer(c, config.rope, config.num_layers))

    def __init__(self, c: DecoderConfig, mesh: Mesh) -> None:
        super().__init__(c, mesh)
        if self.is_last:
            self.norm = RMSNorm(c.hidden_size, c.norm_eps)
