"""transformers' attention interface over the paged KV cache, and its masks said in words."""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from octavo.attention.metadata import ModelInput
from octavo.layers.attention import PagedAttention
from octavo.layers.heads import Heads

NAME: Final = "octavo"
"""The name of octavo's functions in transformers' tables."""

_HEAD_MULTIPLE = 8
"""The head sizes that kernels have are multiples of this; smaller heads are padded with zeros."""


class Unfit(Exception):
    """A layer asks for something that the paged cache does not compute."""


class Seen(NamedTuple):
    """The tokens that a query sees; transformers hands this object to the layers in place of a mask.

    window: tokens, itself included; None for all. chunk: tokens of an aligned range that ends the past; None for none.
    """

    window: int | None = None
    chunk: int | None = None


class Call(NamedTuple):
    """The sizes and options of an attention layer's call of its kernel."""

    layer: int
    """Number of the layer."""
    heads: int
    kv_heads: int
    dim: int
    """Size of a head of queries and keys."""
    value_dim: int
    """Size of a head of values."""
    scale: float
    window: int | None
    """Keys up to itself that a query sees, itself included; None for all."""
    soft_cap: float | None
    """Bound of scores, by tanh; None for none."""

    @property
    def cache_dim(self) -> int:
        """The size of a head in the cache: that of keys or values, whichever is larger, in whole vectors."""
        return -(-max(self.dim, self.value_dim) // _HEAD_MULTIPLE) * _HEAD_MULTIPLE


RECORDED: ContextVar[dict[nn.Module, Call]] = ContextVar("octavo_recorded_calls")
"""The noted calls of layers that have no `CallAttention` yet."""


@dataclass
class Step:
    """The input of the step that is being computed, which all layers of one model share."""

    batch: ModelInput | None = None


class CallAttention(nn.Module):
    """Computes the calls of one attention layer, all of which ask for the same."""

    def __init__(self, call: Call, step: Step) -> None:
        super().__init__()
        self.call = call
        self.paged = PagedAttention(
            Heads(call.heads, call.kv_heads, call.cache_dim),
            scale=call.scale,
            sliding_window=call.window,
            soft_cap=call.soft_cap,
        )
        self._step = step

    def forward(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> Tensor:
        """query, key and value [1, heads, tokens, dim] → [1, tokens, heads, value_dim]."""
        if call != self.call:
            raise Unfit(f"layer {call.layer} asks for {call}, and at start for {self.call}")
        assert self._step.batch is not None, "a layer is called outside of a step"
        q, k, v = (_packed(each, call.cache_dim) for each in (query, key, value))
        out: Tensor = self.paged(q, k, v, self._step.batch)
        out = out.view(1, len(q), call.heads, call.cache_dim)
        return out[..., : call.value_dim]


def _packed(x: Tensor, dim: int) -> Tensor:
    """[1, heads, tokens, dim] → [tokens, heads, dim], dense; padded with zeros up to `dim`."""
    rows = x[0].transpose(0, 1)
    return F.pad(rows, (0, dim - rows.shape[-1])) if rows.shape[-1] < dim else rows.contiguous()


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Seen | Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Compute transformers' attention interface: each of query, key and value is [1, heads, tokens, dim].

    Raises Unfit.
    """
    layer = getattr(module, "layer_idx", None)
    if not isinstance(layer, int):
        raise Unfit(f"{type(module).__name__} has no layer_idx")
    if s_aux is not None:
        raise Unfit(f"layer {layer} has attention sinks")
    if not getattr(module, "is_causal", True):
        raise Unfit(f"layer {layer} also attends to later tokens")
    if not isinstance(attention_mask, Seen):
        raise Unfit(f"layer {layer} has a mask of its own ({type(attention_mask).__name__})")
    if attention_mask.chunk is not None:
        raise Unfit(f"layer {layer} attends in chunks of {attention_mask.chunk} tokens")
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    sizes = query.shape[1], key.shape[1], query.shape[3], value.shape[3]
    call = Call(layer, *sizes, scale, attention_mask.window, softcap)
    if (own := getattr(module, "octavo_attention", None)) is not None:
        return own(query, key, value, call), None
    calls = RECORDED.get()
    if module in calls:
        raise Unfit(f"layer {layer} attends twice")
    calls[module] = call
    return query.new_empty(1, query.shape[2], query.shape[1], value.shape[3]), None


def describe(
    *, config: Any = None, local_size: int | None = None, use_vmap: bool = False, mask_function: Any = None, **_: Any
) -> Seen:
    """Say in words which mask transformers is about to make. Raises Unfit."""
    from transformers.masking_utils import causal_mask_function

    if use_vmap:
        raise Unfit("a mask is a function of the model's own")
    if local_size is None:
        if mask_function is not causal_mask_function:
            raise Unfit("a mask is neither causal nor a window")
        return Seen()
    if local_size == getattr(config, "attention_chunk_size", None):
        return Seen(chunk=local_size)
    return Seen(window=local_size)


def _no_experts(module: nn.Module, hidden_states: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(hidden_states)


def register() -> None:
    """Enter octavo's functions into transformers' tables; a second time changes nothing."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.moe import ExpertsInterface

    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, describe)
    ExpertsInterface.register(NAME, _no_experts)
