"""Zamba2: Mamba2 in every layer, and before some of them blocks of attention and MLP that several layers share.

A block reads the stream beside the embeddings of the tokens. Each layer adds products of its own to those of the block,
through a narrow width, and has a projection behind it. Source: https://arxiv.org/abs/2411.15242.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from torch import Tensor, nn

from octavo.attention.metadata import ModelInput
from octavo.config.checkpoint import Checkpoint
from octavo.config.section import LARGEST_SIZE
from octavo.core.model_shape import LayerCache
from octavo.distributed.mesh import Mesh
from octavo.errors import ConfigError
from octavo.layers.attention import PagedAttention
from octavo.layers.elementwise import OPERATOR_OF, Elementwise, activation, addition
from octavo.layers.heads import Heads
from octavo.layers.linear import ColumnLinear, HeadsLinear, QKVLinear, joined_linear
from octavo.layers.norm import RMSNorm
from octavo.layers.recurrent import Mamba2, MambaOptions, RecurrentSizes
from octavo.layers.rotary import Rotary
from octavo.models.blocks import stream_norm
from octavo.models.config import DecoderConfig, even_share
from octavo.models.decoder import DecoderStack
from octavo.models.hybrid import RECURRENT, read_kinds
from octavo.models.ropes import read_rope

_SHARING: Final = "hybrid"
"""The kind of a layer that has a block before its Mamba2."""


@dataclass(frozen=True, kw_only=True)
class Zamba2Config(DecoderConfig):
    """num_blocks: the number of blocks, which take turns. rank: that of the layers' own products, of the MLP and
    perhaps of attention."""

    kinds: tuple[str, ...]
    sizes: RecurrentSizes
    options: MambaOptions
    num_blocks: int
    rank: int
    has_attention_adapters: bool

    @property
    def sharing(self) -> Sequence[int]:
        """The layers with a block before them."""
        return [layer for layer, kind in enumerate(self.kinds) if kind == _SHARING]

    def caches_of(self, layer: int, mesh: Mesh) -> Sequence[LayerCache]:
        state = LayerCache(self.sizes.state(mesh))
        return (state, *super().caches_of(layer, mesh)) if self.kinds[layer] == _SHARING else (state,)


def _adapter(inputs: int, rank: int, outputs: nn.Module) -> nn.Sequential:
    """Make a product through a narrow width, whose first part each rank has whole."""
    return nn.Sequential(ColumnLinear(inputs, rank, Mesh.single()), outputs)


class _Attention(nn.Module):
    """The projections of a block around attention; the attention itself belongs to each layer."""

    def __init__(self, c: Zamba2Config, mesh: Mesh, turns: Sequence[int]) -> None:
        super().__init__()
        width = 2 * c.hidden_size
        self.qkv_proj = QKVLinear(width, c.heads, mesh)
        self.o_proj = joined_linear(c.heads.q_size, c.hidden_size, mesh)
        self.add, self._has_adapters = addition(), c.has_attention_adapters
        for name in "qkv" if c.has_attention_adapters else ():
            own = {
                str(turn): _adapter(width, c.rank, HeadsLinear(c.rank, c.heads, mesh, reads=("1",))) for turn in turns
            }
            self.add_module(f"linear_{name}_adapter_list", nn.ModuleDict(own))

    def project(self, x: Tensor, turn: str) -> Sequence[Tensor]:
        """x [tokens, 2 · hidden] → queries, keys and values, each [tokens, heads, dim]."""
        parts: Sequence[Tensor] = self.qkv_proj(x)
        if not self._has_adapters:
            return parts
        adapters = [self.get_submodule(f"linear_{name}_adapter_list.{turn}") for name in "qkv"]
        own = [adapter(x)[0].flatten(1) for adapter in adapters]
        return [self.add(each.flatten(1), more).view(each.shape) for each, more in zip(parts, own, strict=True)]


class _MLP(nn.Module):
    """`down(act(gate(x)) * up(x))`, with the layer's own products added to gate and up."""

    def __init__(self, c: Zamba2Config, mesh: Mesh, turns: Sequence[int]) -> None:
        super().__init__()
        halves = (c.intermediate_size, c.intermediate_size)
        self.gate_up_proj = ColumnLinear(c.hidden_size, halves, mesh, bias=c.mlp_bias)
        self.down_proj = joined_linear(c.intermediate_size, c.hidden_size, mesh, bias=c.mlp_bias)
        own = {str(turn): _adapter(c.hidden_size, c.rank, ColumnLinear(c.rank, halves, mesh)) for turn in turns}
        self.gate_up_proj_adapter_list = nn.ModuleDict(own)
        self.add, self.act, self.multiply = addition(), activation(c.activation), Elementwise("multiplied")

    def forward(self, x: Tensor, turn: str) -> Tensor:
        """x [tokens, hidden] → [tokens, hidden]."""
        gate, up = self.add(self.gate_up_proj(x), self.gate_up_proj_adapter_list[turn](x)).chunk(2, dim=-1)
        return self.down_proj(self.multiply(self.act(gate), up))


class _Block(nn.Module):
    """The block that layers share. turns: the numbers of these layers among those with blocks."""

    def __init__(self, c: Zamba2Config, mesh: Mesh, turns: Sequence[int]) -> None:
        super().__init__()
        self.input_layernorm, self.pre_ff_layernorm = RMSNorm(2 * c.hidden_size, c.norm_eps), stream_norm(c)
        self.self_attn, self.feed_forward = _Attention(c, mesh, turns), _MLP(c, mesh, turns)


class Zamba2Layer(nn.Module):
    """Mamba2 behind a norm. Beside the stream the embeddings of the tokens are carried."""

    def __init__(self, c: Zamba2Config, mesh: Mesh) -> None:
        super().__init__()
        self.input_layernorm = stream_norm(c)
        self.mamba = Mamba2(c.sizes, c.hidden_size, c.norm_eps, mesh, c.options)
        self.add = addition()

    def forward(self, x: Tensor, embedded: Tensor, batch: ModelInput) -> tuple[Tensor, Tensor]:
        """Return (the stream, the embeddings), each [tokens, hidden]."""
        return self.mixed(x, self.input_layernorm(x), batch), embedded

    def mixed(self, x: Tensor, normed: Tensor, batch: ModelInput) -> Tensor:
        """x, normed [tokens, hidden] → [tokens, hidden]."""
        return self.add(x, self.mamba(normed, batch))


class SharingLayer(nn.Module):
    """Mamba2 that reads the stream and a block's output for it."""

    def __init__(self, c: Zamba2Config, mesh: Mesh, block: _Block, turn: int) -> None:
        super().__init__()
        self.mamba_decoder = Zamba2Layer(c, mesh)
        self.shared_transformer, self._turn = block, str(turn)
        self.rope = None if c.rope is None else Rotary(c.rope)
        self.attend = PagedAttention(c.heads.share(mesh), scale=c.attention_scale)
        self.widen, self.add_to_others = Elementwise("widened", 2 * c.hidden_size), Elementwise("add_to_others")
        self.linear = ColumnLinear(c.hidden_size, c.hidden_size, Mesh.single())

    def forward(self, x: Tensor, embedded: Tensor, batch: ModelInput) -> tuple[Tensor, Tensor]:
        """Return (the stream, the embeddings), each [tokens, hidden]."""
        block, attention = self.shared_transformer, self.shared_transformer.self_attn
        wide = self.widen(x.unsqueeze(1)).flatten(1)  # unlike torch.cat, these operators are compiled for the CPU
        q, k, v = attention.project(block.input_layernorm(self.add_to_others(wide, embedded)), self._turn)
        rotation = None if self.rope is None else self.rope.rotation(batch)
        attended = attention.o_proj(self.attend(q, k, v, batch, rotation))
        made = self.linear(block.feed_forward(block.pre_ff_layernorm(attended), self._turn))
        normed, _ = self.mamba_decoder.input_layernorm.add(made, x)
        return self.mamba_decoder.mixed(x, normed, batch), embedded


class Zamba2ForCausalLM(DecoderStack):
    """The whole model."""

    RENAMED = {"norm": "final_layernorm"}
    carries_residual = False
    config: Zamba2Config

    def __init__(self, c: Zamba2Config, mesh: Mesh) -> None:
        if mesh.pipeline.size > 1:
            raise ConfigError(
                "pipeline_parallel_size: layers of this model share weights, and read embeddings that are not sent "
                "from stage to stage; use tensor_parallel_size"
            )
        turns = {layer: turn for turn, layer in enumerate(c.sharing)}
        blocks = [_Block(c, mesh, range(first, len(turns), c.num_blocks)) for first in range(c.num_blocks)]

        def layer(index: int) -> nn.Module:
            if index not in turns:
                return Zamba2Layer(c, mesh)
            return SharingLayer(c, mesh, blocks[turns[index] % c.num_blocks], turns[index])

        super().__init__(c, mesh, layer)
        # which some files have once for each layer
        again = "|".join(str(layer) for layer, turn in turns.items() if turn >= c.num_blocks) or "none"
        self.ignore(rf"layers\.(?:{again})\.shared_transformer\..*")

    @classmethod
    def read(cls, c: Checkpoint) -> Zamba2Config:
        c.expect_all(use_conv_bias=True, use_long_context=False)
        hidden, count = c.positive("hidden_size"), c.positive("num_attention_heads")
        dim, bias = even_share(c, "hidden_size", 2 * hidden, count), c.bool("add_bias_linear", False)
        sizes = _sizes(c)
        if c.positive("num_key_value_heads", count) != count:
            raise c.error("num_key_value_heads", f"num_attention_heads, which is {count}")
        limits = c.float("time_step_min", 0.001), float("inf")
        options = MambaOptions(bias=bias, out_bias=bias, limits=limits, norm_groups=sizes.key_heads)
        config: Zamba2Config = Zamba2Config.common(
            c,
            heads=Heads(count, count, dim),
            head_dim=dim,
            attention_scale=(dim / 2) ** -0.5,
            rope=read_rope(c, dim) if c.bool("use_mem_rope", False) else None,
            intermediate_size=c.optional_positive("intermediate_size") or 4 * hidden,
            activation=c.expect("hidden_act", *OPERATOR_OF, default="gelu"),
            norm_eps=c.positive_float("rms_norm_eps", 1e-5),
            tied=c.bool("tie_word_embeddings", True),
            mlp_bias=bias,
            windows=(),
            kinds=read_kinds(c, None, (RECURRENT, _SHARING)),
            sizes=sizes,
            options=options,
            num_blocks=c.positive("num_mem_blocks", 1),
            rank=c.positive("adapter_rank", 128),
            has_attention_adapters=c.bool("use_shared_attention_adapter", False),
        )
        if config.num_blocks > len(config.sharing):
            raise c.error("num_mem_blocks", f"at most the {len(config.sharing)} layers that have a block before them")
        return config

    def begin(self, batch: ModelInput) -> tuple[Tensor, Tensor | None]:
        """Return the embeddings [tokens, hidden], and the same to be carried beside the stream."""
        x, _ = super().begin(batch)
        return x, x

    def normalize(self, x: Tensor, residual: Tensor | None) -> Tensor:
        """Normalise the stream alone."""
        assert self.norm is not None, "only the last stage has the norm"
        return self.norm(x)


def _sizes(c: Checkpoint) -> RecurrentSizes:
    """Return the sizes of Mamba2. Raises CheckpointError."""
    heads, groups = c.positive("n_mamba_heads", 8), c.positive("mamba_ngroups", 1)
    inner = int(min(c.positive_float("mamba_expand", 2.0) * c.positive("hidden_size"), LARGEST_SIZE))
    if inner % heads or heads % groups:
        raise c.error("n_mamba_heads", f"a multiple of mamba_ngroups and a divisor of {inner}")
    return RecurrentSizes(heads, groups, c.positive("mamba_d_state", 64), inner // heads, c.positive("mamba_d_conv", 4))
