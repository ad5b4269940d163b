"""Norms and the rotation of heads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from octavo.devices.cuda.runtime import CudaRuntime, power_of_2
from octavo.ops.registry import Implementation
from octavo.ops.rotary import Rotation


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


def make_rotary(runtime: CudaRuntime) -> Callable[..., tuple[Tensor, Tensor]]:
    """Make `octavo.ops.rotary.rotary`, one launch for queries and keys."""

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
        return rotated(
            runtime, q, k, Rotation(positions, table, table, q_weight, k_weight, eps_and_offset, interleaved)
        )

    return rotary


def rotated(runtime: CudaRuntime, q: Tensor, k: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor]:
    """Return q [tokens, heads, dim] and k [tokens, kv_heads, dim] rotated."""
    q, k = dense(q), dense(k)
    outs = [torch.empty(each.shape, dtype=each.dtype, device=each.device) for each in (q, k)]
    weights, constants = rotation_arguments(q, k, rotation)
    runtime.launch(
        "rows.rotary",
        (len(q), q.shape[1] + k.shape[1]),
        *(q, k, *outs, *weights, *q.stride()[:2], *k.stride()[:2], *rotation.eps_and_offset),
        **constants,
    )
    return outs[0], outs[1]


def rotation_arguments(q: Tensor, k: Tensor, rotation: Rotation) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    """Return the tensors and the constants of a rotation, as kernels take them."""
    q_weight, k_weight = rotation.q_weight, rotation.k_weight
    has_norm = q_weight is not None and k_weight is not None
    dim = q.shape[-1]
    constants = {
        "HEADS": q.shape[1],
        "KV_HEADS": k.shape[1],
        "DIM": dim,
        "D": power_of_2(dim),
        "HALF": rotation.k_table.shape[-1] // 2,
        "INTERLEAVED": rotation.interleaved,
        "HAS_NORM": has_norm,
    }
    weights = (q if q_weight is None else q_weight, k if k_weight is None else k_weight)
    return (rotation.positions, rotation.q_table, rotation.k_table, *weights), constants


def dense(x: Tensor) -> Tensor:
    """Return x with the elements of its last dimension side by side."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _with_strides(x: Tensor) -> tuple[Tensor, int]:
    """Return x [tokens, dim] or [tokens, heads, dim] with dense heads, and the number of heads."""
    x = dense(x)
    return x, x.shape[1] if x.dim() == 3 else 1


IMPLEMENTATIONS = (
    Implementation("rms_norm", "triton", make_rms_norm),
    Implementation("add_rms_norm", "triton", make_add_rms_norm),
    Implementation("rotary", "triton", make_rotary),
)
