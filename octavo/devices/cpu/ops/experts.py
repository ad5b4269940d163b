"""Mixtures of experts: routing, products with the panels of many experts, weighted sums."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

import torch
from torch import Tensor

from octavo.devices.cpu.runtime import FLOAT_TYPES, TYPE_CODES, CpuRuntime, dense, lacks, rows_of
from octavo.ops import experts
from octavo.ops.experts import PreparedStack, RouterRule, Routing
from octavo.ops.prepare_linear import LinearShape
from octavo.ops.registry import Implementation

_SCORES: Final = {"softmax": 0, "sigmoid": 1, "softmax_near": 2, "softplus_root": 3}
"""The library's numbers of the scores; the reference computes others."""


class PanelStack(PreparedStack):
    """The panels of `PanelLinear`, or with a number of a format those of `QuantizedPanels`, expert after expert."""

    def __init__(
        self, runtime: CpuRuntime, shape: LinearShape, state: Mapping[str, Tensor], first: int, code: int | None = None
    ) -> None:
        super().__init__(state, first)
        assert all(tensor.is_contiguous() for tensor in state.values()), "experts lie one after the other"
        self._shape, self._empty, self._is_quantized = shape, runtime.empty, code is not None
        self._columns = shape.columns
        panels, order, bias = (state[name].data_ptr() if name in state else 0 for name in ("panels", "order", "bias"))
        sizes = (shape.outputs, shape.inputs)
        self._weights: tuple[int, ...]
        if code is None:
            self._multiply = runtime.cpu.expert_linear
            self._weights = (first, self.experts, panels, bias, *sizes, TYPE_CODES[shape.dtype], shape.is_gated)
        else:
            self._multiply = runtime.cpu.expert_quantized
            self._weights = (first, self.experts, panels, order, bias, *sizes, code, shape.is_gated)

    def __call__(self, x: Tensor, routing: Routing, *, of_tokens: bool, in_float32: bool = False) -> Tensor:
        dtype = x.dtype
        if dtype not in FLOAT_TYPES:
            found = self(x.float(), routing, of_tokens=of_tokens, in_float32=True)
            return found if in_float32 else found.to(dtype)
        rows, inputs, stride = rows_of(x)
        pairs, top_k = len(routing.order), routing.weights.shape[1]
        assert inputs == self._shape.inputs, f"x has {inputs} columns, its weights {self._shape.inputs} inputs"
        assert rows * (top_k if of_tokens else 1) == pairs, f"{rows} rows cannot be those of {pairs} pairs"
        to = torch.float32 if in_float32 else dtype
        out = self._empty((pairs, self._columns), to)
        which = (routing.order.data_ptr(), routing.starts.data_ptr())
        own = (TYPE_CODES[dtype],) if self._is_quantized else ()
        result = (out.data_ptr(), TYPE_CODES[to])
        self._multiply(x.data_ptr(), stride, top_k if of_tokens else 0, pairs, *which, *self._weights, *own, *result)
        return out


def make_route(runtime: CpuRuntime) -> Callable[..., Routing]:
    """Make `octavo.ops.experts.route`."""
    kernel = runtime.cpu.route_experts
    # an older library lacks the last of them
    known = set(_SCORES) if hasattr(runtime.cpu, "route_to_experts") else set(_SCORES) - {"softplus_root"}

    def route(logits: Tensor, rule: RouterRule, bias: Tensor | None = None, factors: Tensor | None = None) -> Routing:
        if rule.score not in known:
            return experts.route(logits, rule, bias, factors)
        logits = dense(logits)
        tokens, count = logits.shape
        assert logits.dtype is torch.float32, f"logits are {logits.dtype}, expected float32"
        routing = _empty_routing(runtime, tokens, count, rule.top_k)
        kernel(
            *(logits.data_ptr(), *(0 if each is None else each.data_ptr() for each in (bias, factors)), tokens, count),
            *(rule.top_k, _SCORES[rule.score], rule.threshold, rule.is_normalized, rule.factor),
            *(rule.num_groups, rule.groups_kept, rule.group_best, rule.corrects_logits),
            *(each.data_ptr() for each in routing),
        )
        return routing

    return route


def make_route_to(runtime: CpuRuntime) -> Callable[..., Routing]:
    """Make `octavo.ops.experts.route_to`; of rules that a choice goes into, the reference."""
    kernel = runtime.cpu.route_to_experts

    def route_to(logits: Tensor, rule: RouterRule, chosen: Tensor) -> Routing:
        if rule.score not in _SCORES or rule.score == "softmax_near":
            return experts.route_to(logits, rule, chosen)
        logits, chosen, (tokens, count) = dense(logits), dense(chosen), logits.shape
        assert logits.dtype is torch.float32, f"logits are {logits.dtype}, expected float32"
        routing = _empty_routing(runtime, tokens, count, rule.top_k)
        kernel(
            *(logits.data_ptr(), chosen.data_ptr(), tokens, count, rule.top_k, _SCORES[rule.score]),
            *(rule.is_normalized, rule.factor, *(each.data_ptr() for each in routing)),
        )
        return routing

    return route_to


def _empty_routing(runtime: CpuRuntime, tokens: int, count: int, top_k: int) -> Routing:
    """Return room for the routing of tokens to so many experts."""
    empty, pairs = runtime.empty, tokens * top_k
    weights, (order, places) = empty((tokens, top_k), torch.float32), (empty((pairs,), torch.int32) for _ in range(2))
    return Routing(weights, order, places, empty((count + 1,), torch.int32))


def make_sum(runtime: CpuRuntime) -> Callable[..., Tensor]:
    """Make `octavo.ops.experts.expert_sum`."""
    kernel, empty = runtime.cpu.expert_sum, runtime.empty

    def expert_sum(
        rows: Tensor, routing: Routing, dtype: torch.dtype, shared: Tensor | None = None, gate: Tensor | None = None
    ) -> Tensor:
        if dtype not in FLOAT_TYPES:
            return experts.expert_sum(rows, routing, dtype, shared, gate)
        rows, gate, (tokens, top_k) = dense(rows), None if gate is None else dense(gate), routing.weights.shape
        width = rows.shape[1]
        assert shared is None or (shared.dtype is dtype and shared.shape == (tokens, width)), "shared is not like out"
        out = empty((tokens, width), dtype)
        kernel(
            *(rows.data_ptr(), routing.places.data_ptr(), routing.weights.data_ptr(), tokens, top_k, width),
            *((0, 0) if shared is None else (shared.data_ptr(), rows_of(shared)[2])),
            *(0 if gate is None else gate.data_ptr(), out.data_ptr(), TYPE_CODES[dtype]),
        )
        return out

    return expert_sum


def make_add_inputs(runtime: CpuRuntime) -> Callable[..., Tensor]:
    """Make `octavo.ops.experts.add_inputs`."""
    kernel, empty = runtime.cpu.add_expert_inputs, runtime.empty

    def add_inputs(out: Tensor, x: Tensor, routing: Routing, experts_before: int) -> Tensor:
        dtype, (tokens, width), top_k = x.dtype, x.shape, routing.weights.shape[1]
        if dtype not in FLOAT_TYPES:
            return experts.add_inputs(out, x, routing, experts_before)
        assert (out.dtype, out.shape) == (dtype, x.shape), "the sum of the others is not like the input"
        total = empty((tokens, width), dtype)
        kernel(
            *(out.data_ptr(), rows_of(out)[2], x.data_ptr(), rows_of(x)[2], routing.places.data_ptr()),
            *(routing.weights.data_ptr(), routing.starts.data_ptr(), experts_before, tokens, top_k, width),
            *(total.data_ptr(), TYPE_CODES[dtype]),
        )
        return total

    return add_inputs


def make_weighted_inputs(runtime: CpuRuntime) -> Callable[..., tuple[Tensor, Tensor]]:
    """Make `octavo.ops.experts.weighted_inputs`."""
    kernel, empty = runtime.cpu.weigh_expert_inputs, runtime.empty

    def weighted_inputs(x: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        dtype, (tokens, width) = x.dtype, x.shape
        if dtype not in FLOAT_TYPES:
            return experts.weighted_inputs(x, weights)
        weights = dense(weights)
        out, ones = empty((tokens, width), dtype), empty((tokens, 1), torch.float32)
        addresses = weights.data_ptr(), tokens, width, out.data_ptr(), ones.data_ptr()
        kernel(x.data_ptr(), rows_of(x)[2], *addresses, TYPE_CODES[dtype])
        return out, ones

    return weighted_inputs


IMPLEMENTATIONS = (
    Implementation("route", "native", make_route, lacks("route_experts")),
    Implementation("route_to", "native", make_route_to, lacks("route_to_experts")),
    Implementation("expert_sum", "native", make_sum),
    Implementation("add_inputs", "native", make_add_inputs, lacks("add_expert_inputs")),
    Implementation("weighted_inputs", "native", make_weighted_inputs, lacks("weigh_expert_inputs")),
)
