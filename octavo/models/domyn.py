"""Domyn Edge: layers between norms, each with a window, a rotation and a head size as the config lists them."""

from __future__ import annotations

from dataclasses import dataclass, replace

from octavo.config.checkpoint import Checkpoint
from octavo.distributed.mesh import Mesh
from octavo.layers.heads import Heads
from octavo.layers.norm import RMSNorm, UnscaledRMSNorm
from octavo.models.blocks import GatedDecoder, SandwichLayer
from octavo.models.config import DecoderConfig, NormPair
from octavo.models.gemma_parts import BETWEEN_NORMS
from octavo.models.ropes import read_rope


@dataclass(frozen=True, kw_only=True)
class DomynConfig(DecoderConfig):
    """`heads` are those of layers without a head size of their own."""

    head_dims: tuple[int, ...]
    """The head size of each layer."""

    def heads_of(self, layer: int) -> Heads:
        return replace(self.heads, dim=self.head_dims[layer])


class DomynEdgeForCausalLM(GatedDecoder):
    """Norms of keys have a weight, those of queries none. Source: https://huggingface.co/domyn/Domyn-Edge-Base."""

    RENAMED = {
        **{name: stored.replace("layernorm", "norm") for name, stored in BETWEEN_NORMS.items()},
        "self_attn": "attention",
        "mlp": "feedforward",
        "input_layernorm": "pre_attention_norm",
    }

    @classmethod
    def read(cls, c: Checkpoint) -> DomynConfig:
        c.refuse("attention_bias", "qkv_bias", "mlp_bias", because="no release has it, and it is not implemented")
        layers = c.positive("num_hidden_layers")
        expected = f"two numbers for each of {layers} layers, the tokens before and behind a query, none of them behind"
        ranges = c.listed("window_sizes", layers, _is_window, expected)
        kinds = c.listed(
            "position_layers", layers, lambda each: each in ("rope", "nope"), f'"rope" or "nope" for {layers} layers'
        )
        config = DomynConfig.common(
            c,
            qk_norms=_norms,
            layer=SandwichLayer,
            windows=tuple(before + 1 if before > 0 else None for before, _ in ranges),
            head_dims=(),
        )
        dims = _head_dims(c, config.heads.dim, layers)
        ropes = {dim: read_rope(c, dim) for dim, kind in zip(dims, kinds, strict=True) if kind == "rope"}
        own = tuple(ropes[dim] if kind == "rope" else None for dim, kind in zip(dims, kinds, strict=True))
        return replace(config, head_dims=dims, ropes=own)


def _norms(c: DecoderConfig, mesh: Mesh) -> NormPair:
    return UnscaledRMSNorm(c.heads.dim, c.norm_eps), RMSNorm(c.heads.dim, c.norm_eps)


def _is_window(each: object) -> bool:
    if not isinstance(each, list) or len(each) != 2 or any(type(size) is not int for size in each):
        return False
    return -1 <= each[0] < 1 << 31 and each[1] in (-1, 0)


def _head_dims(c: Checkpoint, usual: int, layers: int) -> tuple[int, ...]:
    """Return the head size of each layer, which `per_layer_config` may replace. Raises CheckpointError."""
    found, overrides = [usual] * layers, c.section("per_layer_config")
    for name in overrides.values if overrides is not None else ():
        section = overrides and overrides.section(name)
        if section is None or not name.isascii() or not name.isdigit() or not int(name) < layers:
            raise c.error("per_layer_config", f"an object whose keys are numbers of layers, which are {layers}")
        if set(section.values) - {"head_dim"}:
            raise section.error(min(set(section.values) - {"head_dim"}), "head_dim alone")
        found[int(name)] = section.positive("head_dim", usual)
    return tuple(found)
