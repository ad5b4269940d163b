"""Falcon-H1: attention and Mamba2 beside each other in every layer, with a factor at every place.

Source: https://arxiv.org/abs/2507.22448.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Self

from torch import Tensor, nn

from octavo.attention.metadata import ModelInput
from octavo.config.checkpoint import Checkpoint
from octavo.core.model_shape import LayerCache
from octavo.distributed.mesh import Mesh
from octavo.layers.elementwise import Elementwise, addition
from octavo.layers.layer import Layer
from octavo.layers.linear import Pick, PickedLinear, joined_linear
from octavo.layers.recurrent import Mamba2, MambaOptions, RecurrentSizes
from octavo.models.blocks import RotaryAttention, stream_norm
from octavo.models.config import DecoderConfig
from octavo.models.decoder import DecoderStack
from octavo.models.hybrid import read_limits, read_mamba

ARCHITECTURES = ("FalconH1ForCausalLM",)


@dataclass(frozen=True, kw_only=True)
class FalconH1Config(DecoderConfig):
    """Factors of inputs and results of attention and Mamba2, and of the gate and the result of the MLP."""

    sizes: RecurrentSizes
    options: MambaOptions
    attention_factors: tuple[float, float]
    mamba_factors: tuple[float, float]
    mlp_factors: tuple[float, float]

    @classmethod
    def read(cls, c: Checkpoint) -> Self:
        c.expect("hidden_act", "silu")
        bias, sizes = c.bool("attention_bias", False), read_mamba(c, c.positive("hidden_size"))
        options = MambaOptions(
            bias=c.bool("mamba_proj_bias", False),
            convolution_bias=c.bool("mamba_conv_bias", True),
            out_bias=c.bool("projectors_bias", False),
            limits=read_limits(c),
            factors=_factors(c, "ssm_multipliers", 5),
            norm_groups=sizes.key_heads if c.bool("mamba_rms_norm", False) else None,
            is_norm_first=c.bool("mamba_norm_before_gate", True),
        )
        fields = cls.common(
            c,
            qkv_bias=bias,
            out_bias=bias,
            mlp_bias=c.bool("mlp_bias", False),
            embedding_multiplier=c.float("embedding_multiplier", 1.0),
            logit_multiplier=c.float("lm_head_multiplier", 1.0),
            sizes=sizes,
            options=options,
            attention_factors=_pair(c, "attention_in_multiplier", "attention_out_multiplier"),
            mamba_factors=_pair(c, "ssm_in_multiplier", "ssm_out_multiplier"),
            mlp_factors=_factors(c, "mlp_multipliers", 2),
        )
        return fields.with_scale(c.float("key_multiplier", 1.0))

    def with_scale(self, key_factor: float) -> Self:
        """Return this config with the factor of keys as a part of the scores' factor."""
        return replace(self, attention_scale=key_factor * self.heads.dim**-0.5)

    def caches_of(self, layer: int, mesh: Mesh) -> Sequence[LayerCache]:
        return (LayerCache(self.sizes.state(mesh)), *super().caches_of(layer, mesh))


def _factors(c: Checkpoint, name: str, count: int) -> tuple[float, ...]:
    found = c.values.get(name)
    if found is None:
        return (1.0,) * count
    if not isinstance(found, list) or len(found) != count or not all(isinstance(each, int | float) for each in found):
        raise c.error(name, f"a list of {count} numbers")
    return tuple(map(float, found))


def _pair(c: Checkpoint, one: str, other: str) -> tuple[float, float]:
    return c.float(one, 1.0), c.float(other, 1.0)


def _scaled(factor: float) -> nn.Module:
    return nn.Identity() if factor == 1.0 else Elementwise("scaled", factor)


class FalconH1MLP(nn.Module):
    """`down(silu(factor · gate(x)) * up(x))`, times another factor."""

    def __init__(self, c: FalconH1Config, mesh: Mesh) -> None:
        super().__init__()
        (start, length), width = mesh.share(c.intermediate_size), c.intermediate_size
        rows = (slice(start, start + length),)
        picks = [Pick("gate_proj", width, rows, c.mlp_factors[0]), Pick("up_proj", width, rows)]
        self.gate_up_proj = PickedLinear(c.hidden_size, picks, bias=c.mlp_bias, gated=True)
        self.down_proj = joined_linear(width, c.hidden_size, mesh, bias=c.mlp_bias)
        self.after = _scaled(c.mlp_factors[1])

    def forward(self, x: Tensor) -> Tensor:
        """x [tokens, hidden] → [tokens, hidden]."""
        out: Tensor = self.after(self.down_proj(self.gate_up_proj(x)))
        return out


class FalconH1Layer(nn.Module):
    """Mamba2 and attention read the same stream behind one norm, and the MLP that behind another."""

    def __init__(self, c: FalconH1Config, mesh: Mesh, layer: int) -> None:
        super().__init__()
        self.input_layernorm, self.pre_ff_layernorm = stream_norm(c), stream_norm(c)
        self.mamba = Mamba2(c.sizes, c.hidden_size, c.norm_eps, mesh, c.options)
        self.self_attn = RotaryAttention(c, mesh, layer)
        self.feed_forward = FalconH1MLP(c, mesh)
        self.before_mamba, self.after_mamba = map(_scaled, c.mamba_factors)
        self.before_attention, self.after_attention = map(_scaled, c.attention_factors)
        self.add = addition()

    def forward(self, x: Tensor, residual: Tensor | None, batch: ModelInput) -> tuple[Tensor, Tensor]:
        """Return (x, residual), each [tokens, hidden]; the stream is their sum."""
        x, residual = self.input_layernorm.add(x, residual)
        mixed = self.after_mamba(self.mamba(self.before_mamba(x), batch))
        attended = self.after_attention(self.self_attn(self.before_attention(x), batch))
        x, residual = self.pre_ff_layernorm.add(self.add(mixed, attended), residual)
        return self.feed_forward(x), residual


class FalconH1ForCausalLM(DecoderStack):
    """The whole model."""

    Config = FalconH1Config
    RENAMED: ClassVar[Mapping[str, str]] = {"norm": "final_layernorm"}

    def __init__(self, c: FalconH1Config, mesh: Mesh) -> None:
        super().__init__(c, mesh, lambda layer: FalconH1Layer(c, mesh, layer))

    def layers_by_path(self) -> Iterator[tuple[str, Layer]]:
        for path, layer in super().layers_by_path():
            yield path.replace("mamba.final_layernorm", "mamba.norm"), layer


MODEL = FalconH1ForCausalLM
