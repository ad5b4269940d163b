"""Qwen3-Next, Qwen3.5 and 3.6: three layers of the gated delta rule for each one of gated full attention.

Sources: https://qwen.ai/blog?id=qwen3-next, https://qwen.ai/blog?id=qwen3.5.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from octavo.config.checkpoint import Checkpoint
from octavo.distributed.mesh import Mesh
from octavo.layers.norm import RMSNorm
from octavo.layers.picked import Pick
from octavo.layers.recurrent import GatedDeltaNet, RecurrentSizes
from octavo.models.blocks import head_norms
from octavo.models.hybrid import (
    ATTENTION,
    RECURRENT,
    HybridConfig,
    HybridDecoder,
    delta_picks,
    read_delta_sizes,
    read_kinds,
)
from octavo.models.sparse import NORMALIZED, read_shared_mixture, sparse_layers


class Qwen3_5ForCausalLM(HybridDecoder):  # noqa: N801
    """Qwen3.5, with mixtures of experts or without; its projections before the delta rule are a tensor each.

    A quarter of each head turns, unless the config says otherwise, and weights of norms are around zero.
    """

    RECURRENT_NAME = "linear_attn"
    RENAMED = {"shared_experts": "shared_expert", "gated_norm": "norm"}

    @classmethod
    def read(cls, c: Checkpoint) -> HybridConfig:
        num_layers = c.positive("num_hidden_layers")
        interval = c.positive("full_attention_interval", 4)
        kinds = [RECURRENT if (layer + 1) % interval else ATTENTION for layer in range(num_layers)]
        own: dict[str, Any] = {}
        if c.values.get("num_experts") not in (None, 0):
            own = {"mixture": read_shared_mixture(c, is_normalized=NORMALIZED[True]), "sparse": sparse_layers(c)}
            if "intermediate_size" not in c.values:
                own["intermediate_size"] = c.positive("moe_intermediate_size")  # no layer is dense
        return HybridConfig.common(
            c,
            head_dim=c.positive("head_dim", 256),
            rotary_share=0.25,
            norm=partial(RMSNorm, offset=1.0),
            qk_norms=head_norms,
            attention_gate="q_proj",
            bias=c.bool("attention_bias", False),
            windows=(),
            kinds=read_kinds(c, kinds),
            sizes=read_delta_sizes(c),
            recurrence=partial(_delta_net, picks=cls.picks),
            **own,
        )

    picks = staticmethod(delta_picks)


Qwen3_5MoeForCausalLM = Qwen3_5ForCausalLM


class Qwen3NextForCausalLM(Qwen3_5ForCausalLM):
    """Qwen3-Next: projections before the delta rule are stored by key head."""

    @staticmethod
    def picks(sizes: RecurrentSizes, mesh: Mesh) -> list[Pick]:
        """Return the picks of tensors that have everything of the first key head, then everything of the next."""
        share = sizes.heads // sizes.key_heads
        own_keys, own = sizes.rows(mesh, of_keys=True), sizes.rows(mesh, of_keys=False)
        step = 2 * sizes.key_dim + 2 * share * sizes.value_dim

        def of_keys(start: int) -> list[slice]:
            starts = [key * step + start for key in range(own_keys.start, own_keys.stop)]
            return [slice(each, each + sizes.key_dim) for each in starts]

        def of_heads(step: int, start: int, width: int) -> list[slice]:
            heads = range(own.start, own.stop)
            starts = [head // share * step + start + head % share * width for head in heads]
            return [slice(each, each + width) for each in starts]

        first = 2 * sizes.key_dim
        values = of_heads(step, first, sizes.value_dim)
        gates = of_heads(step, first + share * sizes.value_dim, sizes.value_dim)
        wide, narrow = sizes.channels + sizes.value_size, 2 * sizes.heads
        return [
            Pick("in_proj_qkvz", wide, [*of_keys(0), *of_keys(sizes.key_dim), *values, *gates]),
            Pick("in_proj_ba", narrow, [*of_heads(2 * share, 0, 1), *of_heads(2 * share, share, 1)]),
        ]


def _delta_net(
    c: HybridConfig, mesh: Mesh, layer: int, *, picks: Callable[[RecurrentSizes, Mesh], list[Pick]]
) -> GatedDeltaNet:
    return GatedDeltaNet(c.sizes, c.hidden_size, c.norm_eps, mesh, picks(c.sizes, mesh))
