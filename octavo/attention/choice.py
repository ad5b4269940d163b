"""Which attention backend a model gets, and why."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from octavo.attention.backend import AttentionBackend
from octavo.attention.cpu import CpuBackend, Runtime
from octavo.attention.reference import ReferenceBackend


@dataclass(frozen=True, slots=True)
class BackendChoice:
    """A backend and the reason for it."""

    backend: AttentionBackend
    because: str


def choose_backend(
    runtime: Runtime | None,
    dtype: torch.dtype,
    cache_dtype: torch.dtype,
    *,
    head_dim: int,
    block_size: int,
) -> BackendChoice:
    """The compiled kernels where there are any and they can, plain torch otherwise.

    `runtime` is what the device's kernels run with; None where there are none.
    """
    if runtime is None:
        return BackendChoice(ReferenceBackend(cache_dtype), "no compiled kernels run here")
    obstacle = CpuBackend.obstacle(dtype, cache_dtype, head_dim, block_size)
    if obstacle is not None:
        return BackendChoice(ReferenceBackend(cache_dtype), obstacle)
    return BackendChoice(CpuBackend(runtime, cache_dtype), f"compiled; runs at {runtime.cpu.instruction_set}")
