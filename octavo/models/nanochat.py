"""NanoChat: norms without weights, also of token embeddings and of heads after they turn, and capped logits.

Source: https://github.com/karpathy/nanochat.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

from torch import Tensor

from octavo.attention.metadata import ModelInput
from octavo.config.checkpoint import Checkpoint
from octavo.distributed.mesh import Mesh
from octavo.layers.elementwise import OPERATOR_OF, Elementwise
from octavo.layers.norm import UnscaledRMSNorm
from octavo.layers.rope import LinearScaling
from octavo.models.blocks import GatedDecoder, PlainMLP, unscaled_head_norms
from octavo.models.config import DecoderConfig


@dataclass(frozen=True, kw_only=True)
class NanoChatConfig(DecoderConfig):
    """Adds the cap of logits, which become `cap * tanh(logit / cap)`."""

    logit_soft_cap: float | None


class NanoChatForCausalLM(GatedDecoder):
    """The whole model. Heads turn the other way round."""

    RENAMED: ClassVar[Mapping[str, str]] = {"up_proj": "fc1", "down_proj": "fc2"}

    @classmethod
    def read(cls, c: Checkpoint) -> NanoChatConfig:
        has_cap = c.values.get("final_logit_softcapping", 15.0) is not None
        config = NanoChatConfig.common(
            c,
            norm=UnscaledRMSNorm,
            bias=c.bool("attention_bias", False),
            qk_norms=unscaled_head_norms,
            are_norms_last=True,
            activation=c.expect("hidden_act", *OPERATOR_OF, default="relu2"),
            mlp=PlainMLP,
            logit_soft_cap=c.positive_float("final_logit_softcapping", 15.0) if has_cap else None,
        )
        if config.rope is None or config.rope.scaling is not None:
            raise c.error("rope_parameters", 'those of rope_type "default"')
        return replace(config, rope=replace(config.rope, scaling=LinearScaling(-1.0)))

    def __init__(self, c: NanoChatConfig, mesh: Mesh) -> None:
        super().__init__(c, mesh)
        self.embedding_norm = UnscaledRMSNorm(c.hidden_size, c.norm_eps) if self.is_first else None
        self.logit_factor = None if c.logit_soft_cap is None else Elementwise("soft_capped", c.logit_soft_cap)

    def embed(self, x: Tensor, batch: ModelInput) -> Tensor:
        """Normalise token embeddings x [tokens, hidden]."""
        x = super().embed(x, batch)
        return x if self.embedding_norm is None else self.embedding_norm(x)
