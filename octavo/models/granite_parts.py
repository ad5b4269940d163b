"""What the Granite families share: factors, and mixtures of experts under IBM's names."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, Final

from octavo.config.checkpoint import Checkpoint
from octavo.layers.elementwise import Elementwise
from octavo.layers.experts import StoredExperts
from octavo.models.blocks import GatedLayer, LayerClass, SandwichLayer
from octavo.models.config import DecoderConfig
from octavo.models.sparse import Mixture
from octavo.ops.experts import RouterRule

MIXTURE_NAMES: Final[Mapping[str, str]] = {
    "mlp": "",
    "gate": "block_sparse_moe.router.layer",
    "experts": "block_sparse_moe",
    "shared_experts": "shared_mlp",
    "down_proj": "output_linear",
}
"""Names of a mixture's modules, for `RENAMED`."""


def read_factors(c: Checkpoint) -> dict[str, Any]:
    """Return the factors of all Granite families: 1 unless the config says otherwise, that of the scores included."""
    return {
        "embedding_multiplier": c.float("embedding_multiplier", 1.0),
        "attention_scale": c.float("attention_multiplier", 1.0),
        "residual_multiplier": c.float("residual_multiplier", 1.0),
        "logit_multiplier": 1.0 / c.positive_float("logits_scaling", 1.0),
    }


def read_granite_mixture(c: Checkpoint, width: int, shared_width: int) -> Mixture:
    """Read a mixture whose experts are `width` wide, beside a shared one."""
    return Mixture(
        experts=c.positive("num_local_experts"),
        width=width,
        # softmax over the chosen ones alone
        rule=RouterRule(c.positive("num_experts_per_tok"), is_normalized=True),
        stored=StoredExperts(is_stacked=True, stacks=("input_linear.weight", "output_linear.weight")),
        shared_width=shared_width,
    )


def granite_layer(c: DecoderConfig) -> LayerClass:
    """Return what joins attention and MLP to a layer."""
    scaled = partial(SandwichLayer, after=lambda c: Elementwise("scaled", c.residual_multiplier))
    return scaled if c.residual_multiplier != 1 else GatedLayer
