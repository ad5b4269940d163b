"""MiMo-V2 and -Flash: values are narrower than keys, and layers with a window have more of both, and sinks.

Source: https://arxiv.org/abs/2601.02780.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor, nn

from octavo.attention.metadata import ModelInput
from octavo.config.checkpoint import Checkpoint
from octavo.distributed.mesh import Mesh
from octavo.layers.attention import PagedAttention, SinkAttention
from octavo.layers.elementwise import Elementwise
from octavo.layers.heads import Heads
from octavo.layers.linear import joined_linear
from octavo.layers.picked import Pick, PickedLinear
from octavo.layers.rotary import Rotary
from octavo.models.blocks import GatedDecoder
from octavo.models.config import DecoderConfig, windows_by_kind
from octavo.models.ropes import read_rope
from octavo.models.sparse import corrected, has_tensor, sparse_by_kind


@dataclass(frozen=True, kw_only=True)
class MiMoConfig(DecoderConfig):
    """`heads` are those of layers that see all tokens; the cache holds values as wide as keys, which end with zeros."""

    windowed_heads: Heads
    """The heads of the other layers."""
    value_dim: int
    """Elements of a value."""
    value_factor: float
    """The factor of values."""
    is_joined: bool
    """Whether queries, keys and values are one stored tensor."""

    def heads_of(self, layer: int) -> Heads:
        return self.heads if self.window_of(layer) is None else self.windowed_heads


class NarrowValuesLinear(PickedLinear):
    """x [tokens, inputs] → q [tokens, heads, dim], k [tokens, kv_heads, dim] and v [tokens, kv_heads, value_dim]."""

    def __init__(
        self, inputs: int, heads: Heads, value_dim: int, mesh: Mesh, *, bias: bool, is_joined: bool = False
    ) -> None:
        """is_joined: one stored tensor, `qkv_proj`, has all queries, behind them all keys, and all values."""
        own, (start, length) = heads.share(mesh), heads.kv_share(mesh)
        first, count = start // heads.dim * value_dim, length // heads.dim * value_dim
        rows = {"q_proj": heads.query_share(mesh), "k_proj": (start, length), "v_proj": (first, count)}
        sizes = heads.q_size, heads.kv_size, heads.kv * value_dim
        places = [0, sizes[0], sizes[0] + sizes[1]] if is_joined else [0, 0, 0]
        picks = [
            Pick(*(("qkv_proj", sum(sizes)) if is_joined else (name, size)), (slice(at + begin, at + begin + many),))
            for (name, (begin, many)), size, at in zip(rows.items(), sizes, places, strict=True)
        ]
        super().__init__(inputs, picks, bias=bias)
        self._widths, self._shapes = [each.length for each in picks], [(own.query, heads.dim), (own.kv, heads.dim)]
        self._shapes.append((own.kv, value_dim))

    def forward(self, x: Tensor) -> Sequence[Tensor]:  # type: ignore[override]
        """x [tokens, inputs] → q, k, v, views of one tensor."""
        parts = torch.split(self.prepared(x), self._widths, dim=1)
        return [part.view(len(x), *shape) for part, shape in zip(parts, self._shapes, strict=True)]


class Attention(nn.Module):
    """Grouped-query attention whose values are narrower than keys and have a factor."""

    def __init__(self, c: MiMoConfig, mesh: Mesh, layer: int) -> None:
        super().__init__()
        heads, window, rope = c.heads_of(layer), c.window_of(layer), c.rope_of(layer)
        assert rope is not None
        self.qkv_proj = NarrowValuesLinear(
            c.hidden_size, heads, c.value_dim, mesh, bias=c.qkv_bias, is_joined=c.is_joined
        )
        self.rope = Rotary(rope)
        self.attend: PagedAttention = (
            PagedAttention(heads.share(mesh)) if window is None else SinkAttention(heads, mesh, sliding_window=window)
        )
        self.widened = Elementwise("widened", heads.dim)
        self._value_dim = c.value_dim
        self.factor = Elementwise("scaled", c.value_factor)
        self.o_proj = joined_linear(heads.query * c.value_dim, c.hidden_size, mesh)

    def forward(self, x: Tensor, batch: ModelInput) -> Tensor:
        """x [tokens, hidden] → [tokens, hidden]."""
        q, k, v = self.qkv_proj(x)
        attended = self.attend(q, k, self.widened(v), batch, self.rope.rotation(batch))
        values = self.factor(attended.reshape(-1, q.shape[2])[:, : self._value_dim])
        return self.o_proj(values.view(len(x), -1))


class MiMoV2FlashForCausalLM(GatedDecoder):
    """The whole model. Mixtures are those of DeepSeek V3 without shared experts."""

    REPLACED = {".attention_sink_bias": ".sinks"}
    SHARE: ClassVar[float] = 0.334
    """The share of a head that is rotated, where the config does not say."""
    FACTOR: ClassVar[float | None] = 0.707
    """The factor of values."""

    @classmethod
    def read(cls, c: Checkpoint) -> MiMoConfig:
        c.refuse("add_full_attention_sink_bias", "n_shared_experts", because="it is not implemented")
        c.expect("add_swa_attention_sink_bias", True)
        query, kv = c.positive("num_attention_heads"), c.positive("num_key_value_heads")
        dim, value_dim = c.positive("head_dim", 192), c.positive("v_head_dim", 128)
        c.expect_all(swa_num_attention_heads=query, swa_head_dim=dim, swa_v_head_dim=value_dim)
        windowed = Heads(query, c.positive("swa_num_key_value_heads", 2 * kv), dim)
        if value_dim > dim:
            raise c.error("v_head_dim", f"at most head_dim, which is {dim}")
        if query % windowed.kv:
            raise c.error("num_attention_heads", f"a multiple of the key and value heads, which are {windowed.kv}")
        windows, read = windows_by_kind(c), partial(read_rope, c, dim, share=cls.SHARE)
        has_scale = c.values.get("attention_value_scale", cls.FACTOR) is not None
        config = MiMoConfig.common(
            c,
            head_dim=dim,
            rotary_share=cls.SHARE,
            norm_eps=c.positive_float("rms_norm_eps", 1e-5),
            qkv_bias=c.bool("attention_bias", False),
            windows=windows,
            attention=Attention,
            mixture=corrected(c),
            sparse=sparse_by_kind(c, 1),
            windowed_heads=windowed,
            value_dim=value_dim,
            value_factor=c.float("attention_value_scale", cls.FACTOR or 1.0) if has_scale else 1.0,
            is_joined=_is_joined(c),
        )
        if config.ropes or c.values.get("swa_rope_theta") is None:
            return config
        local = replace(read(), theta=c.positive_float("swa_rope_theta"))
        return replace(config, ropes=tuple(config.rope if window is None else local for window in windows))


class MiMoV2ForCausalLM(MiMoV2FlashForCausalLM):
    """MiMo-V2 and the text of its Omni: whole heads turn, and values are not multiplied, unless the config says so."""

    SHARE = 1.0
    FACTOR = None


def _is_joined(c: Checkpoint) -> bool:
    if not has_tensor(c, ".self_attn.qkv_proj.weight"):
        return False
    # these have the rows of each of num_key_value_heads groups together, with scales of their own for each group
    c.refuse("quantization_config", because="quantised weights of queries, keys and values together are not read")
    return True
