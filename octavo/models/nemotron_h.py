"""Nemotron-H and Nemotron 3 Nano: each layer is one of Mamba2, attention without positions, an MLP, or experts.

Source: https://arxiv.org/abs/2504.03624.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Final, Self

from torch import Tensor, nn

from octavo.attention.metadata import ModelInput
from octavo.config.checkpoint import Checkpoint
from octavo.distributed.mesh import Mesh
from octavo.layers.experts import StoredExperts
from octavo.layers.recurrent import Mamba2, MambaOptions, RecurrentSizes
from octavo.models.blocks import PlainMLP, RotaryAttention, stream_norm
from octavo.models.decoder import DecoderStack
from octavo.models.hybrid import ATTENTION, RECURRENT, HybridConfig, HybridDecoder, read_kinds
from octavo.models.sparse import Mixture, SparseMLP, read_stored
from octavo.ops.experts import RouterRule

ARCHITECTURES = ("NemotronHForCausalLM",)
_KINDS: Final = {"M": RECURRENT, "*": ATTENTION, "-": "mlp", "E": "moe"}


@dataclass(frozen=True, kw_only=True)
class NemotronHConfig(HybridConfig):
    """`kinds` has mlp and moe too, or follows from the letters of `hybrid_override_pattern`."""

    sizes: RecurrentSizes
    options: MambaOptions
    mixture: Mixture | None

    @classmethod
    def read(cls, c: Checkpoint) -> Self:
        c.expect("mamba_hidden_act", "silu", default="silu")
        c.refuse("moe_latent_size", because="experts behind a smaller projection are not implemented")
        letters = str(c.values.get("hybrid_override_pattern") or "")
        kinds = read_kinds(c, [_KINDS.get(each, each) for each in letters], tuple(_KINDS.values()))
        groups, bias = c.positive("n_groups", 8), c.bool("use_bias", False)
        heads = c.positive("mamba_num_heads")
        if heads % groups:
            raise c.error("n_groups", f"a divisor of mamba_num_heads, which is {heads}")
        sizes = RecurrentSizes(
            heads, groups, c.positive("ssm_state_size"), c.positive("mamba_head_dim"), c.positive("conv_kernel", 4)
        )
        options = MambaOptions(
            bias=bias,
            convolution_bias=c.bool("use_conv_bias", True),
            out_bias=bias,
            limits=(c.float("time_step_min", 0.001), float("inf")),
            norm_groups=groups,
        )
        eps = c.positive_float("layer_norm_epsilon", 1e-5)
        return cls.common(
            c,
            num_layers=len(kinds),
            rope=None,
            norm_eps=eps,
            eps=eps,
            mlp_bias=c.bool("mlp_bias", False),
            activation=c.expect("mlp_hidden_act", "relu2", default="relu2"),
            windows=(),
            kinds=kinds,
            sizes=sizes,
            options=options,
            mixture=_mixture(c) if "moe" in kinds else None,
        )


def _mixture(c: Checkpoint) -> Mixture:
    rule = RouterRule(
        c.positive("num_experts_per_tok"),
        score="sigmoid",
        is_normalized=c.bool("norm_topk_prob", True),
        factor=c.float("routed_scaling_factor", 1.0),
        num_groups=c.positive("n_group", 1),
        groups_kept=c.positive("topk_group", 1),
    )
    return Mixture(
        experts=c.positive("n_routed_experts"),
        width=c.positive("moe_intermediate_size"),
        rule=rule,
        stored=read_stored(c, StoredExperts(gate=None)),
        correction="gate.e_score_correction_bias",
        activation="relu2",
        shared_width=c.positive("moe_shared_expert_intermediate_size"),
    )


class NemotronHLayer(nn.Module):
    """One mixer behind a norm; the residual stream is carried beside x."""

    def __init__(self, c: NemotronHConfig, mixer: nn.Module, *, is_cached: bool) -> None:
        super().__init__()
        self.input_layernorm = stream_norm(c)
        self.mixer, self._is_cached = mixer, is_cached

    def forward(self, x: Tensor, residual: Tensor | None, batch: ModelInput) -> tuple[Tensor, Tensor]:
        """Return (x, residual), each [tokens, hidden]; the stream is their sum."""
        x, residual = self.input_layernorm.add(x, residual)
        return (self.mixer(x, batch) if self._is_cached else self.mixer(x)), residual


class NemotronHForCausalLM(HybridDecoder):
    """The whole model."""

    Config = NemotronHConfig
    PREFIXES = ("backbone.", "model.")
    RECURRENT_NAME = "mixer"
    RENAMED: ClassVar[Mapping[str, str]] = {
        "embed_tokens": "embeddings",
        "norm": "norm_f",
        "input_layernorm": "norm",
    }

    def __init__(self, c: NemotronHConfig, mesh: Mesh) -> None:
        def layer(index: int) -> nn.Module:
            kind = c.kinds[index]
            mixer: nn.Module
            if kind == RECURRENT:
                mixer = Mamba2(c.sizes, c.hidden_size, c.eps, mesh, c.options)
            elif kind == ATTENTION:
                mixer = RotaryAttention(c, mesh, index)
            else:
                mixer = PlainMLP(c, mesh) if c.mixture is None or kind == "mlp" else SparseMLP(c, c.mixture, mesh)
            return NemotronHLayer(c, mixer, is_cached=kind in (RECURRENT, ATTENTION))

        DecoderStack.__init__(self, c, mesh, layer)


MODEL = NemotronHForCausalLM
