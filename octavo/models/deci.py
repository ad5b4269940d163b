"""Nemotron-NAS (DeciLM): Llama whose layers differ in heads of keys and in width, or lack attention or MLP.

Source: https://arxiv.org/abs/2411.19146.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

from torch import Tensor, nn

from octavo.attention.metadata import ModelInput
from octavo.config.checkpoint import Checkpoint
from octavo.config.section import Section
from octavo.core.model_shape import LayerCache
from octavo.distributed.mesh import Mesh
from octavo.layers.heads import Heads
from octavo.layers.linear import ColumnLinear
from octavo.models.blocks import GatedMLP, RotaryAttention, stream_norm
from octavo.models.config import DecoderConfig
from octavo.models.decoder import DecoderStack

_ABSENT: Final = ("window_length", "num_sink_tokens", "unshifted_sink", "sparsify", "moe", "mamba", "llama4")
"""Keys that the releases' class allows in a block, and that no release uses."""


class Block(NamedTuple):
    """The parts of a layer: `kv_heads` of its attention, and the `width` of its MLP; 0 for an absent part, None for one
    product in its place."""

    kv_heads: int | None
    width: int | None


@dataclass(frozen=True, kw_only=True)
class DeciConfig(DecoderConfig):
    """`heads` and `intermediate_size` are the largest ones."""

    blocks: tuple[Block, ...]

    def heads_of(self, layer: int) -> Heads:
        return replace(self.heads, kv=self.blocks[layer].kv_heads or self.heads.kv)

    def caches_of(self, layer: int, mesh: Mesh) -> Sequence[LayerCache]:
        return super().caches_of(layer, mesh) if self.blocks[layer].kv_heads else ()


class Product(nn.Module):
    """One product in the place of attention or of an MLP, whole on every rank."""

    def __init__(self, c: DecoderConfig, name: str, *, bias: bool) -> None:
        super().__init__()
        self._name = name
        self.add_module(name, ColumnLinear(c.hidden_size, c.hidden_size, Mesh.single(), bias=bias))

    def forward(self, x: Tensor, batch: ModelInput | None = None) -> Tensor:
        """x [tokens, hidden] → [tokens, hidden]."""
        return self.get_submodule(self._name)(x)


class Layer(nn.Module):
    """Llama's layer without what its block leaves out, norms included."""

    def __init__(self, c: DeciConfig, mesh: Mesh, index: int) -> None:
        super().__init__()
        kv_heads, width = c.blocks[index]
        self.self_attn: nn.Module | None = None
        self.mlp: nn.Module | None = None
        if kv_heads != 0:
            self.input_layernorm = stream_norm(c)
            self.self_attn = (
                Product(c, "linear_attn", bias=c.out_bias) if kv_heads is None else RotaryAttention(c, mesh, index)
            )
        if width != 0:
            self.post_attention_layernorm = stream_norm(c)
            self.mlp = (
                Product(c, "linear_mlp", bias=c.mlp_bias)
                if width is None
                else GatedMLP(replace(c, intermediate_size=width), mesh)
            )

    def forward(self, x: Tensor, residual: Tensor | None, batch: ModelInput) -> tuple[Tensor, Tensor | None]:
        """Return (x, residual), each [tokens, hidden]; the stream is their sum."""
        if self.self_attn is not None:
            x, residual = self.input_layernorm.add(x, residual)
            x = self.self_attn(x, batch)
        if self.mlp is not None:
            x, residual = self.post_attention_layernorm.add(x, residual)
            x = self.mlp(x)
        return x, residual


class DeciLMForCausalLM(DecoderStack):
    """The whole model."""

    @classmethod
    def read(cls, c: Checkpoint) -> DeciConfig:
        blocks = _read_blocks(c)
        query = c.positive("num_attention_heads")
        most = max(block.kv_heads or 0 for block in blocks)
        width = max(block.width or 0 for block in blocks)
        if not most or blocks[0] == (0, 0):
            raise c.error("block_configs", "attention in some layer, and attention or an MLP in the first one")
        bias = c.bool("attention_bias", False)
        config: DeciConfig = DeciConfig.common(
            c,
            bias=bias,
            mlp_bias=c.bool("mlp_bias", False),
            intermediate_size=width or c.positive("hidden_size"),
            blocks=blocks,
        )
        return replace(config, heads=Heads(query, most, config.heads.dim))

    def __init__(self, c: DeciConfig, mesh: Mesh) -> None:
        super().__init__(c, mesh, lambda index: Layer(c, mesh, index))
        linear = "|".join(str(index) for index, block in enumerate(c.blocks) if block.kv_heads is None)
        self._linear = re.compile(rf"(layers\.(?:{linear})\.self_attn\.)o_proj\.") if linear else None

    def stored_name(self, path: str) -> str:
        # in GGUF files such a product has the name of the projection behind attention
        name = super().stored_name(path)
        return name if self._linear is None else self._linear.sub(r"\1linear_attn.", name)


def _read_blocks(c: Checkpoint) -> tuple[Block, ...]:
    """Return the block of each layer. Raises CheckpointError or UnsupportedModel."""
    count, query, hidden = map(c.positive, ("num_hidden_layers", "num_attention_heads", "hidden_size"))
    expected = f"an object with attention and ffn for each of {count} layers"
    stated = c.listed("block_configs", count, lambda each: isinstance(each, dict), expected)
    blocks = []
    for layer, values in enumerate(stated):
        block = Section(values, c.origin("block_configs"), f"block_configs[{layer}].")
        attention, mlp = block.section("attention"), block.section("ffn")
        if attention is None or mlp is None:
            raise c.error("block_configs", expected)
        for part in (attention, mlp):
            part.refuse(*_ABSENT, because="no release has it, and it is not implemented")
        blocks.append(Block(_read_heads(attention, query), _read_width(mlp, hidden)))
    return tuple(blocks)


def _read_heads(attention: Section, query: int) -> int | None:
    if attention.bool("no_op", False):
        return 0
    if attention.bool("replace_with_linear", False):
        return None
    if attention.values.get("num_key_value_heads") is None:
        return query // attention.divisor("n_heads_in_group", "num_attention_heads", query)
    return attention.divisor("num_key_value_heads", "num_attention_heads", query)


def _read_width(mlp: Section, hidden: int) -> int | None:
    """Return the width of an MLP: as stated, or two thirds of a multiple of the layers', filled up to 256."""
    if mlp.bool("no_op", False):
        return 0
    if mlp.bool("replace_with_linear", False):
        return None
    mlp.expect("hidden_act", "silu")
    if mlp.values.get("intermediate_size") is not None:
        return mlp.positive("intermediate_size")
    multiple = mlp.positive_float("ffn_mult")
    if multiple > 1 << 10:
        raise mlp.error("ffn_mult", "a number of at most 1024")
    if not (width := int(2 * multiple * hidden / 3)):
        raise mlp.error("ffn_mult", f"at least {1.5 / hidden:g}, with which an MLP is one wide; no_op leaves it out")
    return -(-width // 256) * 256
