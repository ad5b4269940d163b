"""Norms and the rotation of heads."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from octavo.devices.cuda.runtime import CudaRuntime, dense, implementation, power_of_2
from octavo.ops.rotary import Rotation


def rms_norm(runtime: CudaRuntime, x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    """Return what `octavo.ops.norm.rms_norm` does."""
    return _normed(runtime, x, None, weight, eps, offset)[0]


def add_rms_norm(
    runtime: CudaRuntime, x: Tensor, residual: Tensor, weight: Tensor, eps: float, offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Return what `octavo.ops.norm.add_rms_norm` does."""
    return _normed(runtime, x, residual.contiguous(), weight, eps, offset)


def _normed(
    runtime: CudaRuntime, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, offset: float
) -> tuple[Tensor, Tensor]:
    """Return the norm of the sum of x [tokens, dim] or [tokens, heads, dim] and `residual`, and the sum."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    x, dim = dense(x), x.shape[-1]
    total = x if residual is None else torch.empty(x.shape, dtype=x.dtype, device=x.device)
    runtime.launch(
        "rows.rms_norm",
        (out.numel() // dim,),
        *(x, x if residual is None else residual, weight, total, out, x.stride(0), x.stride(-2), eps, offset),
        HEADS=x.shape[1] if x.dim() == 3 else 1,
        DIM=dim,
        D=power_of_2(dim),
        ADDS=residual is not None,
    )
    return out, total


def rotary(
    runtime: CudaRuntime, q: Tensor, k: Tensor, positions: Tensor, table: Tensor, *options: Any
) -> tuple[Tensor, Tensor]:
    """Return what `octavo.ops.rotary.rotary` does, by one launch for queries and keys."""
    return rotated(runtime, q, k, Rotation(positions, table, table, *options))


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


IMPLEMENTATIONS = (implementation(rms_norm), implementation(add_rms_norm), implementation(rotary))
