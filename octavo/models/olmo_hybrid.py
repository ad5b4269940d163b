"""OLMo Hybrid: three layers of the gated delta rule, with norms before it, for each one of OLMo 3's attention.

Source: https://allenai.org/blog/olmo-hybrid.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, Final

from torch import Tensor, nn

from octavo.attention.metadata import ModelInput
from octavo.config.checkpoint import Checkpoint
from octavo.distributed.mesh import Mesh
from octavo.layers.elementwise import addition
from octavo.layers.picked import Pick
from octavo.layers.recurrent import GatedDeltaNet, RecurrentSizes
from octavo.models.blocks import GatedLayer, LateNormLayer, RotaryAttention, width_norms
from octavo.models.config import DecoderConfig
from octavo.models.hybrid import ATTENTION, RECURRENT, HybridConfig, HybridDecoder, read_kinds, stored_convolutions

_EPS = 1e-5
"""The eps of the norms behind the delta rule; the norms of the stream may have another."""


_STORED_NORMS: Final = {"attention_layer_norm": "input_layernorm", "feedforward_layer_norm": "post_attention_layernorm"}
"""Names of norms of the layers: in the release, and in files that transformers writes."""


class RecurrentBlock(GatedLayer):
    """A layer with a state, which returns the whole stream as those with attention do."""

    def __init__(self, c: DecoderConfig, mixer: nn.Module, mlp: nn.Module) -> None:
        super().__init__(c, mixer, mlp)
        self.add = addition()

    def forward(self, x: Tensor, residual: None, batch: ModelInput) -> tuple[Tensor, None]:  # type: ignore[override]
        """Return (the stream [tokens, hidden], None)."""
        return self.add(*super().forward(x, residual, batch)), None


def _layer(c: DecoderConfig, mixer: nn.Module, mlp: nn.Module) -> nn.Module:
    return (LateNormLayer if isinstance(mixer, RotaryAttention) else RecurrentBlock)(c, mixer, mlp)


def _turns(c: Checkpoint) -> bool:
    """Return whether heads turn: not where the base of the rotation is null, as in the release."""
    section = c.section("rope_parameters")
    values = c.values if section is None or "rope_theta" not in section.values else section.values
    return values.get("rope_theta", 0) is not None


class OlmoHybridForCausalLM(HybridDecoder):
    """The whole model."""

    RECURRENT_NAME = "linear_attn"
    RENAMED = {
        "attention_output_norm": "post_attention_layernorm",
        "mlp_output_norm": "post_feedforward_layernorm",
        "gated_norm": "o_norm",
        "out_proj": "o_proj",
    }
    carries_residual = False

    @classmethod
    def read(cls, c: Checkpoint) -> HybridConfig:
        num_layers, heads = c.positive("num_hidden_layers"), c.positive("num_attention_heads")
        kinds = [ATTENTION if layer % 4 == 3 else RECURRENT for layer in range(num_layers)]
        value_heads = c.positive("linear_num_value_heads", heads)
        key_heads = c.divisor("linear_num_key_heads", "linear_num_value_heads", value_heads, heads)
        key_dim = c.positive("linear_key_head_dim", int(0.75 * c.positive("hidden_size") / key_heads))
        value_dim = c.positive("linear_value_head_dim", 2 * key_dim)
        sizes = RecurrentSizes(value_heads, key_heads, key_dim, value_dim, c.positive("linear_conv_kernel_dim", 4))
        own: dict[str, Any] = {} if _turns(c) else {"rope": None}
        return HybridConfig.common(
            c,
            bias=c.bool("attention_bias", False),
            qk_norms=width_norms,
            layer=_layer,
            windows=(),
            kinds=read_kinds(c, kinds if ATTENTION in kinds else [*kinds[:-1], ATTENTION]),
            sizes=sizes,
            recurrence=partial(
                _delta_net,
                factor=2.0 if c.bool("linear_allow_neg_eigval", True) else 1.0,
                convolutions=stored_convolutions(c, sizes),
            ),
            **own,
        )

    def own_name(self, name: str) -> str:
        path, last, suffix = name.rpartition(".weight")
        for stored, own in _STORED_NORMS.items():
            if path.endswith(f".{stored}"):
                path = path.removesuffix(stored) + own
        return path + last + suffix


def _delta_net(
    c: HybridConfig, mesh: Mesh, layer: int, *, factor: float, convolutions: Mapping[str, int]
) -> GatedDeltaNet:
    sizes = c.sizes
    keys = (sizes.rows(mesh, of_keys=True, width=sizes.key_dim),)
    values = (sizes.rows(mesh, of_keys=False, width=sizes.value_dim),)
    heads = (sizes.rows(mesh, of_keys=False),)
    picks = [
        Pick("q_proj", sizes.key_size, keys),
        Pick("k_proj", sizes.key_size, keys),
        Pick("v_proj", sizes.value_size, values),
        Pick("g_proj", sizes.value_size, values),
        Pick("b_proj", sizes.heads, heads),
        Pick("a_proj", sizes.heads, heads),
    ]
    return GatedDeltaNet(sizes, c.hidden_size, _EPS, mesh, picks, factor=factor, convolutions=convolutions)
