"""The parts that the Gemma families share: norms with weights around zero, gated GELU, and scaled embeddings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Self

from octavo.config.checkpoint import Checkpoint
from octavo.config.media.media_families import media_family
from octavo.distributed.mesh import Mesh
from octavo.layers.elementwise import RoundedFactor
from octavo.layers.norm import RMSNorm
from octavo.models.blocks import GatedDecoder
from octavo.models.config import DecoderConfig
from octavo.models.fields import BEHIND, fields

GELU = "gelu_pytorch_tanh"


@dataclass(frozen=True, kw_only=True)
class GemmaConfig(DecoderConfig):
    """Head and embedding share a table unless the config says otherwise."""

    @classmethod
    def gemma(cls, c: Checkpoint, **own: Any) -> Self:
        """Read the keys that the families share; `own` adds or replaces fields. Raises CheckpointError or
        UnsupportedModel."""
        # "vision" is for tokens of images alone
        if not own.get("is_bidirectional"):
            c.expect("use_bidirectional_attention", False, "vision")
        fields: dict[str, Any] = {
            "has_whole_prompts": media_family(c.architecture).has_whole_prompts,
            "head_dim": c.positive("head_dim", 256),
            "tied": c.bool("tie_word_embeddings", True),
            "norm": partial(RMSNorm, offset=1.0),
            "activation": GELU,
            "bias": c.bool("attention_bias", False),
        }
        return cls.common(c, **{**fields, **own})


def read_attention_scale(c: Checkpoint) -> float:
    """Return the factor of scores that `query_pre_attn_scalar` makes."""
    return c.positive_float("query_pre_attn_scalar", 256.0) ** -0.5


BETWEEN_NORMS: Final[Mapping[str, str]] = {
    **BEHIND,
    "post_attention_layernorm": "pre_feedforward_layernorm",
}
"""The names of a `SandwichLayer`'s norms."""


class GemmaDecoder(GatedDecoder):
    """A stack whose embeddings are multiplied by the root of their width."""

    COMMON = GemmaConfig.gemma
    EXPECTED = fields(hidden_activation=GELU)
    keeps_vectors = True

    def __init__(self, c: GemmaConfig, mesh: Mesh) -> None:
        super().__init__(c, mesh)
        self.embedding_factor = RoundedFactor(c.hidden_size**0.5)
