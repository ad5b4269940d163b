"""Norms and the rotation of heads."""

from __future__ import annotations

from collections.abc import Sequence
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


def normed_streams(runtime: CudaRuntime, x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return what `octavo.ops.hyper.normed_streams` does."""
    return rms_norm(runtime, x.float(), weight, eps)


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
    k_out = torch.empty(k.shape, dtype=k.dtype, device=k.device)
    # a cache with a token in each block
    return rotate_into(runtime, (q, k), (k_out.unsqueeze(2),), None, rotation), k_out


def rotate_into(
    runtime: CudaRuntime, heads: tuple[Tensor, ...], planes: Sequence[Tensor], slots: Tensor | None, rotation: Rotation
) -> Tensor:
    """Return q rotated; write k, rotated, and perhaps v to their slots in planes [blocks, heads, block_size, dim].

    heads: q [tokens, heads, dim], k and perhaps v [tokens, kv_heads, dim]. slots: int64 [tokens]; None if token i has
    slot i.
    """
    q, k, *_ = heads = tuple(map(dense, heads))
    q_weight, k_weight = rotation.q_weight, rotation.k_weight
    out, dim = torch.empty(q.shape, dtype=q.dtype, device=q.device), q.shape[-1]
    runtime.launch(
        "rows.rotate_and_store",
        (len(q), sum(each.shape[1] for each in heads)),
        *(q, k, heads[-1], out, planes[0], planes[-1], rotation.positions if slots is None else slots),
        *(rotation.positions, rotation.q_table, rotation.k_table),
        *(q if q_weight is None else q_weight, k if k_weight is None else k_weight),
        *(stride for each in (q, k, heads[-1]) for stride in each.stride()[:2]),
        *(*planes[0].stride()[:3], *rotation.eps_and_offset),
        HEADS=q.shape[1],
        KV_HEADS=k.shape[1],
        DIM=dim,
        D=power_of_2(dim),
        BLOCK=planes[0].shape[2],
        HALF=rotation.k_table.shape[-1] // 2,
        INTERLEAVED=rotation.interleaved,
        HAS_NORM=q_weight is not None and k_weight is not None,
        HAS_SLOTS=slots is not None,
    )
    return out


IMPLEMENTATIONS = (
    implementation(rms_norm),
    implementation(add_rms_norm),
    implementation(normed_streams),
    implementation(rotary),
)
