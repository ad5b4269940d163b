"""Families with Mamba2: Bamba, Falcon-H1, Nemotron-H, and Mamba2 alone; and those with Mamba alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

from torch import Tensor, nn

from octavo.attention.metadata import ModelInput
from octavo.config.checkpoint import Checkpoint
from octavo.config.section import LARGEST_SIZE
from octavo.core.model_shape import LayerCache
from octavo.distributed.mesh import Mesh
from octavo.layers.elementwise import Elementwise, addition
from octavo.layers.experts import StoredExperts
from octavo.layers.heads import Heads
from octavo.layers.linear import joined_linear
from octavo.layers.norm import RMSNorm, UnscaledRMSNorm
from octavo.layers.picked import Pick, PickedLinear
from octavo.layers.recurrent import Mamba2, MambaOptions, RecurrentSizes
from octavo.layers.selective import SelectiveOptions
from octavo.models.blocks import PlainMLP, RotaryAttention, attention_of, mlp_of, stream_norm
from octavo.models.config import DecoderConfig
from octavo.models.decoder import DecoderStack
from octavo.models.fields import fields
from octavo.models.hybrid import (
    ATTENTION,
    RECURRENT,
    HybridConfig,
    HybridDecoder,
    mamba2_fields,
    read_kinds,
    read_limits,
    read_mamba,
    read_mamba_sizes,
    read_selective,
)
from octavo.models.sparse import Mixture, corrected, read_stored


class BambaForCausalLM(HybridDecoder):
    """Bamba: Mamba2 in most layers, attention in some; half of each head turns.

    Source: https://huggingface.co/blog/bamba.
    """

    RECURRENT_NAME = "mamba"
    RENAMED = {
        "norm": "final_layernorm",
        "mlp": "feed_forward",
        "post_attention_layernorm": "pre_ff_layernorm",
    }

    @classmethod
    def read(cls, c: Checkpoint) -> HybridConfig:
        attending = c.values.get("attn_layer_indices") or []
        if not isinstance(attending, list):
            raise c.error("attn_layer_indices", "a list of layers")
        kinds = [ATTENTION if each in attending else RECURRENT for each in range(c.positive("num_hidden_layers"))]
        return HybridConfig.common(
            c,
            rotary_share=0.5,
            norm_eps=c.positive_float("rms_norm_eps", 1e-5),
            bias=c.bool("attention_bias", False),
            mlp_bias=c.bool("mlp_bias", False),
            windows=(),
            kinds=read_kinds(c, kinds),
            **read_mamba(c),
        )


@dataclass(frozen=True, kw_only=True)
class FalconH1Config(DecoderConfig):
    """Factors of inputs and results of attention and Mamba2, and of the gate and the result of the MLP."""

    sizes: RecurrentSizes
    options: MambaOptions
    attention_factors: tuple[float, float]
    mamba_factors: tuple[float, float]
    mlp_factors: tuple[float, float]

    def caches_of(self, layer: int, mesh: Mesh) -> Sequence[LayerCache]:
        return (LayerCache(self.sizes.state(mesh)), *super().caches_of(layer, mesh))


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
        return self.after(self.down_proj(self.gate_up_proj(x)))


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
    """Falcon-H1: attention and Mamba2 beside each other in every layer, with a factor at every place.

    Source: https://arxiv.org/abs/2507.22448.
    """

    RENAMED = {"norm": "final_layernorm"}

    def __init__(self, c: FalconH1Config, mesh: Mesh) -> None:
        super().__init__(c, mesh, lambda layer: FalconH1Layer(c, mesh, layer))

    @classmethod
    def read(cls, c: Checkpoint) -> FalconH1Config:
        sizes = read_mamba_sizes(c)
        config = FalconH1Config.common(
            c,
            norm_eps=c.positive_float("rms_norm_eps", 1e-5),
            bias=c.bool("attention_bias", False),
            mlp_bias=c.bool("mlp_bias", False),
            embedding_multiplier=c.float("embedding_multiplier", 1.0),
            logit_multiplier=c.float("lm_head_multiplier", 1.0),
            sizes=sizes,
            options=MambaOptions(
                bias=c.bool("mamba_proj_bias", False),
                convolution_bias=c.bool("mamba_conv_bias", True),
                out_bias=c.bool("projectors_bias", False),
                limits=read_limits(c),
                factors=_factors(c, "ssm_multipliers", 5),
                norm_groups=sizes.key_heads if c.bool("mamba_rms_norm", False) else None,
                is_norm_first=c.bool("mamba_norm_before_gate", True),
            ),
            attention_factors=(c.float("attention_in_multiplier", 1.0), c.float("attention_out_multiplier", 1.0)),
            mamba_factors=(c.float("ssm_in_multiplier", 1.0), c.float("ssm_out_multiplier", 1.0)),
            mlp_factors=_factors(c, "mlp_multipliers", 2),
        )
        # the factor of keys is a part of the scores' factor
        return replace(config, attention_scale=c.float("key_multiplier", 1.0) * config.heads.dim**-0.5)


def _factors(c: Checkpoint, name: str, count: int) -> tuple[float, ...]:
    if c.values.get(name) is None:
        return (1.0,) * count
    found = c.listed(
        name, count, lambda each: isinstance(each, int | float) and abs(each) < 1e300, f"a list of {count} numbers"
    )
    return tuple(map(float, found))


def _scaled(factor: float) -> nn.Module:
    return nn.Identity() if factor == 1.0 else Elementwise("scaled", factor)


class NemotronHLayer(nn.Module):
    """One mixer behind a norm; the residual stream is carried beside x."""

    def __init__(self, c: HybridConfig, mixer: nn.Module, *, is_cached: bool) -> None:
        super().__init__()
        self.input_layernorm = stream_norm(c)
        self.mixer, self._is_cached = mixer, is_cached

    def forward(self, x: Tensor, residual: Tensor | None, batch: ModelInput) -> tuple[Tensor, Tensor]:
        """Return (x, residual), each [tokens, hidden]; the stream is their sum."""
        x, residual = self.input_layernorm.add(x, residual)
        return (self.mixer(x, batch) if self._is_cached else self.mixer(x)), residual


@dataclass(frozen=True, kw_only=True)
class PuzzleConfig(HybridConfig):
    """Layers whose sizes differ."""

    mixtures: tuple[Mixture | None, ...]
    """The experts of each layer; None where a layer has none."""


class NemotronHForCausalLM(HybridDecoder):
    """Nemotron-H and Nemotron 3: each layer is one of Mamba2, attention without positions, an MLP, or experts.

    Kinds have mlp and moe too, or follow from the letters of `hybrid_override_pattern`.
    Source: https://arxiv.org/abs/2504.03624.
    """

    KINDS: ClassVar[Mapping[str, str]] = {"M": RECURRENT, "*": ATTENTION, "-": "mlp", "E": "moe"}
    PREFIXES = ("backbone.", "model.")
    RECURRENT_NAME = "mixer"
    RENAMED = {"embed_tokens": "embeddings", "norm": "norm_f", "input_layernorm": "norm"}

    def __init__(self, c: HybridConfig, mesh: Mesh) -> None:
        def layer(index: int) -> nn.Module:
            is_cached = c.kinds[index] in (RECURRENT, ATTENTION)
            own = replace(c, mixture=c.mixtures[index]) if isinstance(c, PuzzleConfig) else c
            return NemotronHLayer(c, (attention_of if is_cached else mlp_of)(own, mesh, index), is_cached=is_cached)

        DecoderStack.__init__(self, c, mesh, layer)

    def own_name(self, name: str) -> str:
        # of Nemotron 3 Nano Omni and Nemotron Nano VL
        return super().own_name(name.removeprefix("language_model."))

    @classmethod
    def read(cls, c: Checkpoint) -> HybridConfig:
        c.expect("mamba_hidden_act", "silu", default="silu")
        letters = str(c.values.get("hybrid_override_pattern") or "")
        kinds = read_kinds(c, [cls.KINDS.get(each, each) for each in letters], tuple(cls.KINDS.values()))
        heads, groups = _heads(c, "mamba_num_heads")
        sizes = RecurrentSizes(
            heads, groups, c.positive("ssm_state_size"), c.positive("mamba_head_dim"), c.positive("conv_kernel", 4)
        )
        return HybridConfig.common(
            c,
            num_layers=len(kinds),
            rope=None,
            norm_eps=c.positive_float("layer_norm_epsilon", 1e-5),
            mlp_bias=c.bool("mlp_bias", False),
            activation=c.expect("mlp_hidden_act", "relu2", default="relu2"),
            mlp=PlainMLP,
            windows=(),
            kinds=kinds,
            **_recurrence(c, sizes, (c.float("time_step_min", 0.001), float("inf"))),
            mixture=_mixture(c) if "moe" in kinds else None,
            sparse=tuple(kind == "moe" for kind in kinds),
        )


class NemotronHPuzzleForCausalLM(NemotronHForCausalLM):
    """Nemotron-H after a search of architectures: `block_configs` says how experts and windows of each layer differ.

    Source: NVIDIA's releases.
    """

    TYPES: ClassVar[Mapping[str, str]] = {"mamba": RECURRENT, "attention": ATTENTION, "mlp": "mlp", "moe": "moe"}
    OF_EXPERTS: ClassVar[frozenset[str]] = frozenset(
        {"n_routed_experts", "num_experts_per_tok", "moe_intermediate_size", "moe_shared_expert_intermediate_size"}
    )

    @classmethod
    def read(cls, c: Checkpoint) -> PuzzleConfig:
        stated = c.values.get("block_configs")
        expected = f"for each layer an object whose block_type is {', '.join(cls.TYPES)}"
        fits = isinstance(stated, list) and all(isinstance(each, dict) for each in stated)
        if not fits or not stated or any(each.get("block_type") not in cls.TYPES for each in stated):
            raise c.error("block_configs", expected)
        blocks = c.listed("block_configs", len(stated), lambda each: True, expected)
        kinds, layers = [cls.TYPES[each["block_type"]] for each in blocks], [_of_block(c, each) for each in blocks]
        mixtures = tuple(_mixture(own) if kind == "moe" else None for kind, own in zip(kinds, layers, strict=True))
        for kind, block in zip(kinds, blocks, strict=True):
            read = cls.OF_EXPERTS if kind == "moe" else {"sliding_window"} if kind == ATTENTION else frozenset()
            for name in block.keys() - read - {"block_type"}:
                if block[name] is not None and block[name] != c.values.get(name):
                    raise c.error("block_configs", f"{name} as the config has it for all layers")
        first = next((own for own, each in zip(layers, mixtures, strict=True) if each), c)
        config = super().read(_of_block(first, {"layer_types": kinds, "num_hidden_layers": len(kinds)}))
        windows = tuple(
            own.optional_positive("sliding_window") if kind == ATTENTION else None
            for kind, own in zip(kinds, layers, strict=True)
        )
        return PuzzleConfig(**{**vars(config), "mixtures": mixtures, "windows": windows if any(windows) else ()})

    @classmethod
    def of_one_more_layer(cls, c: Checkpoint, config: DecoderConfig) -> Mapping[str, Any]:
        raise c.error(
            "block_configs", "a model without, whose prediction layer method mtp can use; take another method"
        )


def _of_block(c: Checkpoint, values: Mapping[str, Any]) -> Checkpoint:
    """Return the config with other values."""
    made = copy(c)
    made.values = {**c.values, **values}
    return made


class Mamba2ForCausalLM(NemotronHForCausalLM):
    """Mamba2 in every layer, as in Codestral Mamba. Source: https://arxiv.org/abs/2405.21060."""

    @classmethod
    def read(cls, c: Checkpoint) -> HybridConfig:
        c.expect("hidden_act", "silu")
        (heads, groups), dim = _heads(c, "num_heads"), c.positive("head_dim", 64)
        if heads * dim != c.positive("expand", 2) * c.positive("hidden_size"):
            raise c.error("num_heads", f"heads of head_dim {dim} that are expand times hidden_size elements in all")
        sizes = RecurrentSizes(heads, groups, c.positive("state_size", 128), dim, c.positive("conv_kernel", 4))
        return _recurrent_alone(
            c,
            heads=Heads(heads, heads, dim),
            tied=c.bool("tie_word_embeddings", False),
            **_recurrence(c, sizes, read_limits(c)),
        )


class MambaForCausalLM(NemotronHForCausalLM):
    """Mamba in every layer. Source: https://arxiv.org/abs/2312.00752."""

    @classmethod
    def read(cls, c: Checkpoint) -> HybridConfig:
        c.expect("hidden_act", "silu")
        expanded = c.positive("expand", 2) * c.positive("hidden_size")
        channels = c.positive("intermediate_size", min(expanded, LARGEST_SIZE))
        options = SelectiveOptions(
            bias=c.bool("use_bias", False), convolution_bias=c.bool("use_conv_bias", True), norm=cls.norm_of(c)
        )
        return _recurrent_alone(
            c,
            heads=Heads(channels, channels, 1),
            tied=c.bool("tie_word_embeddings", True),
            **read_selective(c, channels, options, state_size="state_size", rank="time_step_rank", taps="conv_kernel"),
        )

    @classmethod
    def norm_of(cls, c: Checkpoint) -> Callable[[int], RMSNorm] | None:
        """Return the function that makes the norms of step, B and C, None where there are none."""
        return None


class FalconMambaForCausalLM(MambaForCausalLM):
    """Falcon Mamba: step, B and C are normalised without weights. Source: https://arxiv.org/abs/2410.05355."""

    @classmethod
    def norm_of(cls, c: Checkpoint) -> Callable[[int], RMSNorm]:
        return partial(UnscaledRMSNorm, eps=c.positive_float("mixer_rms_eps", 1e-6))


def _heads(c: Checkpoint, name: str) -> tuple[int, int]:
    """Return the heads of Mamba2, the value of `name`, and the groups that share keys. Raises CheckpointError."""
    heads = c.positive(name)
    return heads, c.divisor("n_groups", name, heads, 8)


def _recurrence(c: Checkpoint, sizes: RecurrentSizes, limits: tuple[float, float]) -> dict[str, Any]:
    return mamba2_fields(sizes, limits, c.bool("use_bias", False), c.bool("use_conv_bias", True))


def _recurrent_alone(c: Checkpoint, *, heads: Heads, **own: Any) -> HybridConfig:
    """Read the keys that models without attention share. heads: those of all channels."""
    layers = c.positive("num_hidden_layers")
    return HybridConfig(
        num_layers=layers,
        hidden_size=c.positive("hidden_size"),
        intermediate_size=heads.q_size,
        heads=heads,
        vocab_size=c.positive("vocab_size"),
        max_positions=c.max_model_len(),
        norm_eps=c.positive_float("layer_norm_epsilon", 1e-5),
        kinds=(RECURRENT,) * layers,
        **own,
    )


def _mixture(c: Checkpoint) -> Mixture:
    latent = c.optional_positive("moe_latent_size") or 0
    stored = read_stored(c, StoredExperts(gate=None), latent)
    own = fields(activation="relu2", shared_width="moe_shared_expert_intermediate_size")
    return corrected(c, stored=stored, latent_width=latent, **own)
