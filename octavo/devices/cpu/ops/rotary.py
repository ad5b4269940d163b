"""Rotary position embedding, fused with the norms of the heads."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from octavo.devices.cpu.runtime import FLOAT_TYPES, TYPE_CODES, CpuRuntime, dense
from octavo.ops import rotary as reference
from octavo.ops.memory import zeroed
from octavo.ops.registry import Implementation


def make_rotary(runtime: CpuRuntime) -> Callable[..., tuple[Tensor, Tensor]]:
    """Return `octavo.ops.rotary.rotary` on the compiled library; other types than float32 and bfloat16 by reference.

    Raises IndexError for a position outside the table.
    """
    kernel, empty = runtime.cpu.rotary, runtime.empty

    def rotary(
        q: Tensor,
        k: Tensor,
        positions: Tensor,
        table: Tensor,
        q_weight: Tensor | None = None,
        k_weight: Tensor | None = None,
        eps_and_offset: tuple[float, float] = (0.0, 0.0),
        interleaved: bool = False,
    ) -> tuple[Tensor, Tensor]:
        dtype = q.dtype
        if dtype not in FLOAT_TYPES or k.dtype is not dtype:
            return reference.rotary(q, k, positions, table, q_weight, k_weight, eps_and_offset, interleaved)
        q_shape, k_shape = q.shape, k.shape
        tokens, heads, dim = q_shape
        q_out, k_out = empty(q_shape, dtype), empty(k_shape, dtype)
        num_rows, rotated = table.shape
        kernel(
            *(q.data_ptr(), k.data_ptr(), q_out.data_ptr(), k_out.data_ptr()),
            *(_token_stride(q, dim), _token_stride(k, dim), heads, k_shape[1], dim, tokens),
            *(positions.data_ptr(), table.data_ptr(), num_rows, rotated, interleaved),
            *(_address(q_weight, dtype), _address(k_weight, dtype), *eps_and_offset, TYPE_CODES[dtype]),
        )
        return q_out, k_out

    return rotary


def make_rotary_table(runtime: CpuRuntime) -> Callable[..., Tensor]:
    """Return `octavo.ops.rotary.rotary_table` on the compiled library's threads, into memory of its own."""
    kernel = runtime.cpu.rotary_table

    def rotary_table(inverse_frequencies: Tensor, num_positions: int, attention_factor: float = 1.0) -> Tensor:
        frequencies = dense(inverse_frequencies)
        assert frequencies.dtype is torch.float32, "frequencies are float32"
        pairs = len(frequencies)
        table = zeroed((num_positions, 2 * pairs), torch.float32)
        kernel(frequencies.data_ptr(), pairs, num_positions, attention_factor, table.data_ptr())
        return table

    return rotary_table


def _token_stride(x: Tensor, dim: int) -> int:
    stride, head, inner = x.stride()
    assert (head == dim or x.shape[1] == 1) and inner == 1, "heads of a token lie side by side"  # noqa: PT018
    return stride


def _address(weight: Tensor | None, dtype: torch.dtype) -> int:
    if weight is None:
        return 0
    assert weight.dtype is dtype, "norms have the type of what they scale"
    return weight.data_ptr()


IMPLEMENTATIONS = (
    Implementation("rotary", "native", make_rotary),
    Implementation("rotary_table", "native", make_rotary_table),
)
