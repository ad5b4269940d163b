"""Recurrences and the norm behind them. Sizes that the kernels lack are left to the references."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from octavo.devices.cpu.runtime import FLOAT_TYPES, TYPE_CODES, CpuRuntime
from octavo.ops import recurrent as reference
from octavo.ops.registry import Implementation

_TAPS = (2, 3, 4)
_MOST_KEY_DIM = 256
_MOST_HEAD_FLOATS = 65536


def make_short_convolution(runtime: CpuRuntime) -> Callable[..., Tensor]:
    """Make `octavo.ops.recurrent.short_convolution`."""
    kernel, empty = runtime.cpu.short_convolution, runtime.empty

    def short_convolution(
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        states: Tensor,
        metadata: reference.TokenRows,
        gates: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        dtype, (taps, channels) = x.dtype, weight.shape
        if dtype not in FLOAT_TYPES or weight.dtype is not dtype or taps not in _TAPS:
            return reference.short_convolution(x, weight, bias, states, metadata, gates)
        out = empty(x.shape, dtype)
        before, after = gates or (None, None)
        kernel(
            *(_address(each) for each in (x, before, after, weight, bias, out)),
            *(0 if each is None else each.stride(0) for each in (x, before, after)),
            *(channels, taps, gates is None, TYPE_CODES[dtype]),
            *_rows(states, metadata),
        )
        return out

    return short_convolution


def _recurrence(runtime: CpuRuntime, inputs: tuple[Tensor | None, ...], vectors: tuple[Tensor | None, ...]) -> Any:
    """Return a function of limits, states and metadata that runs the kernel; None where it lacks these sizes.

    inputs: query, key, value, step, beta. vectors: decay_log, step_bias, skip or factors.
    """
    _, key, value, step, _ = inputs
    assert key is not None
    assert value is not None
    assert step is not None
    dtype, (tokens, heads, value_dim), (_, key_heads, key_dim) = value.dtype, value.shape, key.shape
    if dtype not in FLOAT_TYPES or key_dim % 2 or key_dim > _MOST_KEY_DIM or key_dim * value_dim > _MOST_HEAD_FLOATS:
        return None
    out = runtime.empty((tokens, heads, value_dim), dtype)
    kernel = runtime.cpu.recurrence if step.shape[1] == heads else runtime.cpu.recurrence_by_key

    def run(limits: tuple[float, float], states: Tensor, metadata: reference.TokenRows) -> Tensor:
        kernel(
            *(_address(each) for each in (*inputs, *vectors, out)),
            *(0 if each is None else each.stride(0) for each in inputs),
            *(heads, key_heads, key_dim, value_dim, *limits, TYPE_CODES[dtype]),
            *_rows(states, metadata),
        )
        return out

    return run


def make_gated_delta_rule(runtime: CpuRuntime) -> Callable[..., Tensor]:
    """Make `octavo.ops.recurrent.gated_delta_rule`."""

    def gated_delta_rule(*arguments: Any) -> Tensor:
        *inputs, numbers, states, metadata = arguments
        run = _recurrence(runtime, tuple(inputs), (*numbers, None)[:3])
        if run is None:
            return reference.gated_delta_rule(*arguments)
        out: Tensor = run(reference.NO_LIMITS, states, metadata)
        return out

    return gated_delta_rule


def make_bounded_delta_rule(runtime: CpuRuntime) -> Callable[..., Tensor]:
    """Make `octavo.ops.recurrent.bounded_delta_rule`."""

    def bounded_delta_rule(*arguments: Any) -> Tensor:
        *inputs, (decay_log, step_bias, bound), states, metadata = arguments
        run = _recurrence(runtime, tuple(inputs), (decay_log, step_bias, None))
        if run is None:
            return reference.bounded_delta_rule(*arguments)
        out: Tensor = run((0.0, bound), states, metadata)
        return out

    return bounded_delta_rule


def make_mamba2_scan(runtime: CpuRuntime) -> Callable[..., Tensor]:
    """Make `octavo.ops.recurrent.mamba2_scan`."""

    def mamba2_scan(*arguments: Any) -> Tensor:
        *inputs, numbers, limits, states, metadata = arguments
        run = _recurrence(runtime, (*inputs, None), numbers)
        out: Tensor = reference.mamba2_scan(*arguments) if run is None else run(limits, states, metadata)
        return out

    return mamba2_scan


def make_selective_scan(runtime: CpuRuntime) -> Callable[..., Tensor]:
    """Make `octavo.ops.recurrent.selective_scan`."""

    def selective_scan(*arguments: Any) -> Tensor:
        *inputs, numbers, states, metadata = arguments
        value, (size, channels) = inputs[2], numbers[0].shape
        if value.dtype not in FLOAT_TYPES or size % 2 or size > _MOST_KEY_DIM:
            return reference.selective_scan(*arguments)
        out = runtime.empty(value.shape, value.dtype)
        runtime.cpu.selective_scan(
            *(_address(each) for each in (*inputs, *numbers, out)),
            *(each.stride(0) for each in inputs),
            *(channels, size, TYPE_CODES[value.dtype]),
            *_rows(states, metadata),
        )
        return out

    return selective_scan


def make_gated_rms_norm(runtime: CpuRuntime) -> Callable[..., Tensor]:
    """Make `octavo.ops.recurrent.gated_rms_norm`."""
    kernel, empty = runtime.cpu.gated_rms_norm, runtime.empty

    def gated_rms_norm(
        x: Tensor, gate: Tensor, weight: Tensor, eps: float, group: int, is_gate_first: bool = False
    ) -> Tensor:
        dtype, (tokens, dim) = x.dtype, x.shape
        if dtype not in FLOAT_TYPES or weight.dtype is not dtype or gate.dtype is not dtype:
            return reference.gated_rms_norm(x, gate, weight, eps, group, is_gate_first)
        out = empty((tokens, dim), dtype)
        kernel(
            *(_address(each) for each in (x, gate, weight, out)),
            *(x.stride(0), gate.stride(0), tokens, dim, group, weight.shape[0], is_gate_first, eps),
            TYPE_CODES[dtype],
        )
        return out

    return gated_rms_norm


def _rows(states: Tensor, metadata: reference.TokenRows) -> tuple[int, ...]:
    assert not metadata.num_guesses, "rows with guesses come in turns (layers/turns.py)"
    tables = metadata.block_tables
    return (
        *(states.data_ptr(), states.stride(0), metadata.query_starts.data_ptr(), metadata.sequence_lengths.data_ptr()),
        *(tables.data_ptr(), tables.stride(0), tables.shape[0], metadata.block_size),
    )


def _address(tensor: Tensor | None) -> int:
    if tensor is None:
        return 0
    assert tensor.stride(-1) == 1 or tensor.shape[-1] == 1, "kernels read rows whose elements lie side by side"
    return tensor.data_ptr()


IMPLEMENTATIONS = (
    Implementation("short_convolution", "native", make_short_convolution),
    Implementation("gated_delta_rule", "native", make_gated_delta_rule),
    Implementation("bounded_delta_rule", "native", make_bounded_delta_rule),
    Implementation("mamba2_scan", "native", make_mamba2_scan),
    Implementation("selective_scan", "native", make_selective_scan),
    Implementation("gated_rms_norm", "native", make_gated_rms_norm),
)
