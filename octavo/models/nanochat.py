"""NanoChat: norms without weights, also of token embeddings and of heads after they turn, and capped logits.

Source: https://github.com/karpathy/nanochat.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from octavo.attention.metadata import ModelInput
from octavo.config.checkpoint import Checkpoint
from octavo.distributed.mesh import Mesh
from octavo.layers.elementwise import Elementwise
from octavo.layers.norm import UnscaledRMSNorm
from octavo.layers.rope import LinearScaling
from octavo.models.blocks import GatedDecoder, PlainMLP, unscaled_head_norms
from octavo.models.config import DecoderConfig
from octavo.models.fields import BIAS, Read, activation, fields, read_cap


@dataclass(frozen=True, kw_only=True)
class NanoChatConfig(DecoderConfig):
    """Adds the cap of logits, which become `cap * tanh(logit / cap)`."""

    logit_soft_cap: float | None


class NanoChatForCausalLM(GatedDecoder):
    """The whole model. Heads turn the other way round."""

    RENAMED = {"up_proj": "fc1", "down_proj": "fc2"}
    COMMON = NanoChatConfig.common
    FIELDS = fields(
        norm=UnscaledRMSNorm,
        bias=BIAS,
        qk_norms=unscaled_head_norms,
        are_norms_last=True,
        activation=activation("relu2"),
        mlp=PlainMLP,
        logit_soft_cap=Read(read_cap, "final_logit_softcapping", 15.0),
    )

    @classmethod
    def read(cls, c: Checkpoint) -> NanoChatConfig:
        config: NanoChatConfig = super().read(c)
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
