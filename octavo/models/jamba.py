"""Jamba: Mamba in most layers, attention without positions in some, and mixtures of experts in every other layer.

Source: https://arxiv.org/abs/2403.19887.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, Final

from octavo.config.checkpoint import Checkpoint
from octavo.config.section import LARGEST_SIZE, MOST_LAYERS
from octavo.layers.norm import RMSNorm
from octavo.layers.selective import SelectiveOptions
from octavo.models.hybrid import ATTENTION, RECURRENT, HybridConfig, HybridDecoder, read_kinds, read_selective
from octavo.models.sparse import read_mixture

_EXPERTS: Final[Mapping[str, Any]] = {
    "experts": ("num_experts", 16),
    "width": "intermediate_size",
    "top_k": ("num_experts_per_tok", 2),
    "is_normalized": False,
}


class JambaForCausalLM(HybridDecoder):
    """The whole model. Step, B and C of Mamba are normalised."""

    RECURRENT_NAME = "mamba"
    RENAMED = {
        "norm": "final_layernorm",
        "mlp": "feed_forward",
        "post_attention_layernorm": "pre_ff_layernorm",
        "gate": "router",
    }

    @classmethod
    def read(cls, c: Checkpoint) -> HybridConfig:
        c.expect("mamba_inner_layernorms", True)
        expanded = c.positive("mamba_expand", 2) * c.positive("hidden_size")
        eps, sparse = c.positive_float("rms_norm_eps", 1e-6), _periodic(c, "expert_layer", 2, 1)
        options = SelectiveOptions(
            bias=c.bool("mamba_proj_bias", False),
            convolution_bias=c.bool("mamba_conv_bias", True),
            norm=partial(RMSNorm, eps=eps),
        )
        return HybridConfig.common(
            c,
            rope=None,
            norm_eps=eps,
            windows=(),
            kinds=read_kinds(c, [ATTENTION if each else RECURRENT for each in _periodic(c, "attn_layer", 8, 4)]),
            **read_selective(
                *(c, min(expanded, LARGEST_SIZE), options),
                state_size="mamba_d_state",
                rank="mamba_dt_rank",
                taps="mamba_d_conv",
            ),
            mixture=read_mixture(c, **_EXPERTS) if c.positive("num_experts", 16) > 1 else None,
            sparse=sparse,
        )


def _periodic(c: Checkpoint, name: str, period: int, offset: int) -> tuple[bool, ...]:
    """Return which layers are of a kind that every so many have, from an offset on. Raises CheckpointError."""
    period, offset = c.positive(f"{name}_period", period), c.int(f"{name}_offset", offset)
    if not 0 <= offset < period:
        raise c.error(f"{name}_offset", f"a number from 0 on below {name}_period, which is {period}")
    return tuple(layer % period == offset for layer in range(min(c.positive("num_hidden_layers"), MOST_LAYERS)))
