"""Decoders whose layers attend or keep a state: which layer does which, and under which name it is stored."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Final

from torch import nn

from octavo.config.checkpoint import Checkpoint
from octavo.config.section import LARGEST_SIZE, MOST_LAYERS, Section, shown
from octavo.core.model_shape import LayerCache
from octavo.distributed.mesh import Mesh
from octavo.errors import UnsupportedModel
from octavo.layers.kimi_delta import KimiDeltaAttention
from octavo.layers.layer import Layer
from octavo.layers.picked import Pick
from octavo.layers.recurrent import Mamba2, MambaOptions, RecurrentSizes
from octavo.layers.selective import SelectiveMixer, SelectiveOptions, SelectiveSizes
from octavo.models.blocks import GatedDecoder
from octavo.models.config import DecoderConfig, Mixer
from octavo.models.sparse import known_tensors

ATTENTION, SLIDING, RECURRENT = "full_attention", "sliding_attention", "linear_attention"
ALIASES: Final = {"attention": ATTENTION, "mamba": RECURRENT, "mamba2": RECURRENT, "conv": RECURRENT}
"""Names of kinds that older configs use."""


@dataclass(frozen=True, kw_only=True)
class HybridConfig(DecoderConfig):
    """A decoder with recurrent layers, all of one size."""

    kinds: tuple[str, ...]
    """ATTENTION, RECURRENT, or a kind of the family's own that caches nothing, for each layer."""
    sizes: Any
    """`RecurrentSizes`, or those of another recurrence."""
    recurrence: Mixer
    """Makes the module in the place of attention."""

    def mixer_of(self, layer: int) -> Mixer | None:
        return self.attention if self.kinds[layer] == ATTENTION else self.recurrence

    def caches_of(self, layer: int, mesh: Mesh) -> Sequence[LayerCache]:
        if self.kinds[layer] == RECURRENT:
            return (LayerCache(self.sizes.state(mesh)),)
        return super().caches_of(layer, mesh) if self.kinds[layer] == ATTENTION else ()


class HybridDecoder(GatedDecoder):
    """A decoder whose recurrent layers are stored under a name of their own."""

    RECURRENT_NAME: ClassVar[str]
    """The stored name in the place of `self_attn`."""
    config: HybridConfig

    def layers_by_path(self) -> Iterator[tuple[str, Layer]]:
        mixer = self.RENAMED.get("self_attn", "self_attn")
        for path, layer in super().layers_by_path():
            parts = path.split(".")
            if parts[0] == "layers" and self.config.kinds[int(parts[1])] == RECURRENT and parts[2] == mixer:
                parts[2] = self.RECURRENT_NAME
            yield ".".join(parts), layer


def read_kinds(
    c: Checkpoint, default: list[str] | None = None, known: Sequence[str] = (ATTENTION, RECURRENT)
) -> tuple[str, ...]:
    """Return the kind of each layer, from `layer_types` or `layers_block_type`. Raises UnsupportedModel."""
    num_layers = c.positive("num_hidden_layers") if c.values.get("num_hidden_layers") is not None else None
    kinds = c.values.get("layer_types") or c.values.get("layers_block_type") or default
    names = kinds if isinstance(kinds, list) and all(isinstance(each, str) for each in kinds) else []
    found = [ALIASES.get(each, each) for each in names]
    if not found or len(found) != (num_layers or len(found)) or any(each not in known for each in found):
        where = c.origin("layer_types", "layers_block_type", "num_hidden_layers")
        raise UnsupportedModel(
            f"{where}: layer_types has {shown(kinds)}, expected {' or '.join(known)} for each of "
            f"{num_layers or 'the'} layers"
        )
    if len(found) > MOST_LAYERS:
        raise c.error("layer_types", f"at most {MOST_LAYERS} layers")
    return tuple(found)


def stored_convolutions(c: Checkpoint, sizes: RecurrentSizes) -> dict[str, int]:
    """Return the tensors of the convolution of queries, keys and values, and the channels of each. A release has a
    tensor for each of the three; transformers joins them, and cuts the joined tensor into thirds when it writes it.
    """
    names, counts = [f"{each}_conv1d" for each in "qkv"], [sizes.key_size, sizes.key_size, sizes.value_size]
    shapes = {each.name.split(".")[-2]: each.shape for each in known_tensors(c) if "_conv1d." in each.name}
    found = [shapes[name][0] for name in names if len(shapes.get(name, ())) == 3]
    return dict(zip(names, found if len(found) == 3 and sum(found) == sizes.channels else counts, strict=True))


def has_flat_logs(c: Checkpoint, *ends: str) -> bool:
    """Return whether the logarithms of decays, stored as `A_log` unless names end otherwise, are [heads]."""
    shapes = [each.shape for each in known_tensors(c) if each.name.endswith(ends or ".A_log")]
    return not shapes or len(shapes[0]) == 1


def read_delta_sizes(c: Checkpoint) -> RecurrentSizes:
    """Return the sizes of the gated delta rule as Qwen's configs name them. Raises CheckpointError."""
    heads = c.positive("linear_num_value_heads", 32)
    return RecurrentSizes(
        heads,
        c.divisor("linear_num_key_heads", "linear_num_value_heads", heads, 16),
        c.positive("linear_key_head_dim", 128),
        c.positive("linear_value_head_dim", 128),
        c.positive("linear_conv_kernel_dim", 4),
    )


def delta_picks(sizes: RecurrentSizes, mesh: Mesh) -> list[Pick]:
    """Return the picks of queries, keys and values in one tensor, and of a tensor each for gate, beta and step."""
    keys = partial(sizes.rows, mesh, of_keys=True, width=sizes.key_dim)
    values = partial(sizes.rows, mesh, of_keys=False, width=sizes.value_dim)
    heads = (sizes.rows(mesh, of_keys=False),)
    return [
        Pick("in_proj_qkv", sizes.channels, (keys(), keys(start=sizes.key_size), values(start=2 * sizes.key_size))),
        Pick("in_proj_z", sizes.value_size, (values(),)),
        Pick("in_proj_b", sizes.heads, heads),
        Pick("in_proj_a", sizes.heads, heads),
    ]


def kimi_delta(**own: Any) -> Mixer:
    """Return the function that makes Kimi's delta attention in the sizes of a config; `own` are its other arguments."""

    def make(c: HybridConfig, mesh: Mesh, layer: int) -> nn.Module:
        return KimiDeltaAttention(c.sizes, c.hidden_size, c.norm_eps, mesh, **own)

    return make


def read_kimi_sizes(c: Checkpoint, *, num_heads: int) -> RecurrentSizes:
    """Return the sizes of Kimi's delta attention, which a release has in a section of their own. num_heads: where the
    config does not say."""
    section = c.section("linear_attn_config")
    heads, dim, taps = (
        c.positive(own, default) if section is None or section.values.get(name) is None else section.positive(name)
        for name, own, default in (
            ("num_heads", "linear_num_heads", num_heads),
            ("head_dim", "linear_head_dim", 128),
            ("short_conv_kernel_size", "linear_conv_kernel_dim", 4),
        )
    )
    return RecurrentSizes(heads, heads, dim, dim, taps)


def read_bound(where: Section, name: str, default: float = -5.0) -> float:
    """Return the bound of decays, which configs state as a number below 0. Raises CheckpointError for another one."""
    bound = -where.float(name, default)
    if not 0 < bound <= 1e6:
        raise where.error(name, "a number below 0, at least -1,000,000")
    return bound


def mamba2(c: HybridConfig, mesh: Mesh, layer: int, options: MambaOptions) -> Mamba2:
    """Make Mamba2 in the sizes of the config."""
    return Mamba2(c.sizes, c.hidden_size, c.norm_eps, mesh, options)


def selective(c: HybridConfig, mesh: Mesh, layer: int, options: SelectiveOptions) -> SelectiveMixer:
    """Make Mamba in the sizes of the config."""
    return SelectiveMixer(c.sizes, c.hidden_size, mesh, options)


def read_selective(
    c: Checkpoint, channels: int, options: SelectiveOptions, *, state_size: str, rank: str, taps: str
) -> dict[str, Any]:
    """Return the fields of a `HybridConfig` with Mamba, whose sizes have these names. Raises CheckpointError."""
    is_stated, quantization = c.values.get(rank) not in (None, "auto"), c.section("quantization_config")
    low = c.positive(rank) if is_stated else -(-c.positive("hidden_size") // 16)
    if quantization is not None and quantization.values.get("quant_method") == "gguf":
        options = replace(options, has_logs=False)
    sizes = SelectiveSizes(channels, c.positive(state_size, 16), low, c.positive(taps, 4))
    return {"sizes": sizes, "recurrence": partial(selective, options=options)}


def read_mamba(c: Checkpoint) -> dict[str, Any]:
    """Return the fields of a `HybridConfig` with Mamba2 under the names that begin with `mamba_`."""
    biases = c.bool("mamba_proj_bias", False), c.bool("mamba_conv_bias", True)
    return mamba2_fields(read_mamba_sizes(c), read_limits(c), *biases)


def mamba2_fields(
    sizes: RecurrentSizes, limits: tuple[float, float], bias: bool, convolution_bias: bool
) -> dict[str, Any]:
    """Return the fields of a `HybridConfig` with Mamba2, whose norm has a group for each key head. bias: whether both
    projections have one."""
    options = MambaOptions(bias, convolution_bias, bias, limits, norm_groups=sizes.key_heads)
    return {"sizes": sizes, "recurrence": partial(mamba2, options=options)}


def read_mamba_sizes(c: Checkpoint) -> RecurrentSizes:
    """Return the sizes of Mamba2 under the names that begin with `mamba_`. Raises CheckpointError."""
    expanded = c.positive_float("mamba_expand", 2.0) * c.positive("hidden_size")
    inner = c.optional_positive("mamba_d_ssm") or int(min(expanded, LARGEST_SIZE))
    heads = c.positive("mamba_n_heads")
    dim = inner // heads if c.values.get("mamba_d_head") in (None, "auto") else c.positive("mamba_d_head")
    if heads * dim != inner:
        raise c.error("mamba_n_heads", f"a number of heads of {dim} elements that are {inner} in all")
    groups = c.divisor("mamba_n_groups", "mamba_n_heads", heads, 1)
    return RecurrentSizes(heads, groups, c.positive("mamba_d_state"), dim, c.positive("mamba_d_conv", 4))


def read_limits(c: Checkpoint) -> tuple[float, float]:
    """Return the limits of Mamba2's time step. Raises CheckpointError."""
    found = c.values.get("time_step_limit")
    if found is None:
        return MambaOptions().limits
    try:
        limits: list[Any] = [each.get("__float__") if isinstance(each, dict) else each for each in found]  # infinity
        least, most = map(float, limits)
    except (TypeError, ValueError, OverflowError):
        least, most = 1.0, 0.0
    if not least <= most:
        raise c.error("time_step_limit", "two numbers, the least and the largest time step")
    return least, most
