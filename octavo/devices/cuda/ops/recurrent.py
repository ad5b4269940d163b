"""Recurrences and the norm behind them: states stay on the device, and the host reads none of their numbers."""

from __future__ import annotations

from functools import partial
from typing import Any, Final

import torch
from torch import Tensor

from octavo.devices.cuda.runtime import CudaRuntime, dense, implementation, power_of_2
from octavo.ops.recurrent import NO_LIMITS, Limits, TokenRows
from octavo.ops.registry import Implementation

CHANNELS: Final = 256
"""Channels of a program of a convolution."""
TOKENS: Final = 16
"""Tokens of a program of a convolution where a row may have several: at least as many as a state has inputs."""
MATRIX: Final = 2048
"""Elements of a head's matrix that one warp keeps in registers."""
SCANNED: Final = 512
"""Elements of Mamba's states whose decays one warp computes."""


def short_convolution(
    runtime: CudaRuntime,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    states: Tensor,
    metadata: TokenRows,
    gates: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Return what `octavo.ops.recurrent.short_convolution` does."""
    (taps, channels), longest = weight.shape, max(metadata.query_lengths)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    x, before, after = (dense(each) for each in (x, *(gates or (x, x))))
    tokens = 1 if longest == 1 else TOKENS
    tensors, strides = _rows(states, metadata)
    runtime.launch(
        "recurrent.short_convolution",
        (len(metadata.query_lengths), -(-channels // CHANNELS), -(-longest // tokens)),
        *(x, before, after, weight, weight if bias is None else bias, out, *tensors),
        *(x.stride(0), before.stride(0), after.stride(0), *strides, channels),
        TAPS=taps,
        HAS_BIAS=bias is not None,
        IS_GATED=gates is not None,
        BLOCK=metadata.block_size,
        BT=tokens,
        BC=CHANNELS,
        enable_fp_fusion=False,  # tiles of one token and of more have the same bits
    )
    return out


def _recurrence(runtime: CudaRuntime, *arguments: Any, limits: Limits = NO_LIMITS) -> Tensor:
    """Return [tokens, heads, value_dim].

    arguments: query, key, value, step, and of the delta rule beta; numbers, states and rows. Numbers are decay_log,
    step_bias, and of Mamba2 skip, of the delta rule perhaps factors. Mamba, whose decay_log is a matrix, has one head.
    """
    query, key, value, step, *others, numbers, states, metadata = arguments
    heads, (key_heads, key_dim), value_dim = value.shape[1], key.shape[1:], value.shape[2]
    out = torch.empty(value.shape, dtype=value.dtype, device=value.device)
    beta, width, is_selective = others[0] if others else step, power_of_2(key_dim), numbers[0].dim() == 2
    columns = min(power_of_2(value_dim), max((SCANNED if is_selective else MATRIX) // width, 1))
    tensors, strides = _rows(states, metadata)
    given = query, key, value, step, beta
    runtime.launch(
        "recurrent.recurrence",
        (len(metadata.query_lengths), heads, -(-value_dim // columns)),
        *(*given, *numbers[:2], numbers[-1], out, *tensors),
        *(*(each.stride(0) for each in (*given, out)), *strides, heads // key_heads, *limits),
        DIM=key_dim,
        D=width,
        VALUE=value_dim,
        BV=columns,
        BLOCK=metadata.block_size,
        IS_DELTA=bool(others),
        HAS_FACTORS=bool(others) and len(numbers) > 2,
        DECAYS_BY_KEY=bool(others) and step.shape[1] != heads,
        IS_BOUNDED=bool(others) and limits != NO_LIMITS,
        IS_SELECTIVE=is_selective,
        num_warps=1,
    )
    return out


def bounded_delta_rule(runtime: CudaRuntime, *arguments: Any) -> Tensor:
    """Return what `octavo.ops.recurrent.bounded_delta_rule` does."""
    *inputs, (decay_log, step_bias, bound), states, metadata = arguments
    return _recurrence(runtime, *inputs, (decay_log, step_bias), states, metadata, limits=(0.0, bound))


def mamba2_scan(runtime: CudaRuntime, *arguments: Any) -> Tensor:
    """Return what `octavo.ops.recurrent.mamba2_scan` does."""
    *given, limits, states, metadata = arguments
    return _recurrence(runtime, *given, states, metadata, limits=limits)


def selective_scan(runtime: CudaRuntime, *arguments: Any) -> Tensor:
    """Return what `octavo.ops.recurrent.selective_scan` does."""
    query, key, value, *others = arguments
    return _recurrence(runtime, *(each.unsqueeze(1) for each in (query, key, value)), *others).squeeze(1)


def gated_rms_norm(
    runtime: CudaRuntime, x: Tensor, gate: Tensor, weight: Tensor, eps: float, group: int, is_gate_first: bool = False
) -> Tensor:
    """Return what `octavo.ops.recurrent.gated_rms_norm` does."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    x, gate = dense(x), dense(gate)
    runtime.launch(
        "recurrent.gated_rms_norm",
        (len(x), x.shape[1] // group),
        *(x, gate, weight, out, x.stride(0), gate.stride(0), out.stride(0), eps),
        GROUP=group,
        D=power_of_2(group),
        HAS_ONE_WEIGHT=len(weight) == group,
        IS_GATE_FIRST=is_gate_first,
    )
    return out


def _rows(states: Tensor, metadata: TokenRows) -> tuple[tuple[Tensor, ...], tuple[int, int]]:
    """Return where the rows of a step keep their states, as kernels take it, and strides."""
    assert not metadata.num_guesses, "rows with guesses come in turns (layers/turns.py)"
    tables = metadata.block_tables
    tensors = states, metadata.query_starts, metadata.sequence_lengths, tables, metadata.slot_mapping
    return tensors, (states.stride(0), tables.stride(0))


IMPLEMENTATIONS = (
    *map(implementation, (short_convolution, bounded_delta_rule, mamba2_scan, selective_scan, gated_rms_norm)),
    Implementation("gated_delta_rule", "triton", lambda runtime: partial(_recurrence, runtime)),
)
