"""Norms, activations and the rotation of heads."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from octavo.devices.cuda.runtime import CudaRuntime, power_of_2
from octavo.ops.registry import Implementation

_BLOCK = 1024


def make_rms_norm(runtime: CudaRuntime) -> Callable[..., Tensor]:
    """Make `octavo.ops.norm.rms_norm`."""

    def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        x, heads = _with_strides(x)
        dim = x.shape[-1]
        runtime.launch(
            "rows.rms_norm",
            (out.numel() // dim,),
            *(x, x, weight, x, out, x.stride(0), x.stride(-2), eps, offset),
            HEADS=heads,
            DIM=dim,
            D=power_of_2(dim),
            ADDS=False,
        )
        return out

    return rms_norm


def make_add_rms_norm(runtime: CudaRuntime) -> Callable[..., tuple[Tensor, Tensor]]:
    """Make `octavo.ops.norm.add_rms_norm`."""

    def add_rms_norm(
        x: Tensor, residual: Tensor, weight: Tensor, eps: float, offset: float = 0.0
    ) -> tuple[Tensor, Tensor]:
        out, total = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for _ in range(2))
        x, heads = _with_strides(x)
        dim = x.shape[-1]
        runtime.launch(
            "rows.rms_norm",
            (out.numel() // dim,),
            *(x, residual.contiguous(), weight, total, out, x.stride(0), x.stride(-2), eps, offset),
            HEADS=heads,
            DIM=dim,
            D=power_of_2(dim),
            ADDS=True,
        )
        return out, total

    return add_rms_norm


def make_silu_and_mul(runtime: CudaRuntime) -> Callable[[Tensor], Tensor]:
    """Make `octavo.ops.elementwise.silu_and_mul`."""

    def silu_and_mul(x: Tensor) -> Tensor:
        tokens, dim = x.shape[0], x.shape[-1] // 2
        out = torch.empty((tokens, dim), dtype=x.dtype, device=x.device)
        grid = (tokens, -(-dim // _BLOCK))
        runtime.launch("rows.silu_and_mul", grid, x.contiguous(), out, dim, BLOCK=_BLOCK)
        return out

    return silu_and_mul


def make_rotary(runtime: CudaRuntime) -> Callable[..., tuple[Tensor, Tensor]]:
    """Make `octavo.ops.rotary.rotary`."""

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
        def turned(x: Tensor, weight: Tensor | None) -> Tensor:
            x, heads = _with_strides(x)
            out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
            dim = x.shape[-1]
            runtime.launch(
                "rows.rotary",
                (len(x) * heads,),
                *(x, out, positions, table, x if weight is None else weight, x.stride(0), x.stride(1)),
                *eps_and_offset,
                HEADS=heads,
                DIM=dim,
                D=power_of_2(dim),
                HALF=table.shape[-1] // 2,
                INTERLEAVED=interleaved,
                HAS_NORM=weight is not None,
            )
            return out

        return turned(q, q_weight), turned(k, k_weight)

    return rotary


def _with_strides(x: Tensor) -> tuple[Tensor, int]:
    """Return x [tokens, dim] or [tokens, heads, dim] with dense heads, and the number of heads."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    return x, x.shape[1] if x.dim() == 3 else 1


IMPLEMENTATIONS = (
    Implementation("rms_norm", "triton", make_rms_norm),
    Implementation("add_rms_norm", "triton", make_add_rms_norm),
    Implementation("silu_and_mul", "triton", make_silu_and_mul),
    Implementation("rotary", "triton", make_rotary),
)
