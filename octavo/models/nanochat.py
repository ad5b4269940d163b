"""NanoChat: norms without weights, also of token embeddings and of heads after they turn, and capped logits.

Source: https://github.com/karpathy/nanochat.
"""

from __future__ import annotations

from dataclasses import replace

from octavo.config.checkpoint import Checkpoint
from octavo.layers.norm import UnscaledRMSNorm
from octavo.layers.rope import LinearScaling
from octavo.models.blocks import GatedDecoder, PlainMLP, unscaled_head_norms
from octavo.models.config import DecoderConfig
from octavo.models.fields import BIAS, Read, activation, fields, read_cap


class NanoChatForCausalLM(GatedDecoder):
    """The whole model. Heads turn the other way round."""

    RENAMED = {"up_proj": "fc1", "down_proj": "fc2"}
    FIELDS = fields(
        norm=UnscaledRMSNorm,
        embedding_norm=UnscaledRMSNorm,
        bias=BIAS,
        qk_norms=unscaled_head_norms,
        are_norms_last=True,
        activation=activation("relu2"),
        mlp=PlainMLP,
        logit_soft_cap=Read(read_cap, "final_logit_softcapping", 15.0),
    )

    @classmethod
    def read(cls, c: Checkpoint) -> DecoderConfig:
        config: DecoderConfig = super().read(c)
        if config.rope is None or config.rope.scaling is not None:
            raise c.error("rope_parameters", 'those of rope_type "default"')
        return replace(config, rope=replace(config.rope, scaling=LinearScaling(-1.0)))
