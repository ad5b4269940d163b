"""What kernels on CUDA run with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from octavo.ops.registry import Ops, bind, implementations


@dataclass(frozen=True)
class CudaRuntime:
    """Options of launches. is_invariant: the bits of a row must not depend on the others, which costs speed."""

    is_invariant: bool = False

    @property
    def options(self) -> dict[str, Any]:
        """Options of every launch: whether products and sums are fused decides the bits, and its default changes."""
        return {"enable_fp_fusion": True}

    def bind(self, overrides: dict[str, str] | None = None) -> Ops:
        """Return the operators."""
        return bind(implementations("octavo.devices.cuda.ops"), overrides, runtime=self, because="made for CUDA")


def compute_type(x: Tensor) -> Any:
    """Return Triton's type of the factors of products. The interpreter, on the CPU, multiplies float32 alone."""
    import triton.language as tl

    if x.device.type == "cpu" or x.dtype is torch.float32:
        return tl.float32
    return tl.bfloat16 if x.dtype is torch.bfloat16 else tl.float16


def power_of_2(number: int, least: int = 16) -> int:
    """Return the smallest power of 2 that is no less than the number, and at least `least`."""
    return max(least, 1 << (number - 1).bit_length())


def num_warps(num_rows: int) -> int:
    """Return the warps of a program that multiplies tiles of so many rows."""
    return 8 if num_rows >= 128 else 4
