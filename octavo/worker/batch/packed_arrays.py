"""Sends arrays to a device in one copy, which costs the host as much as a copy of a single number."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_ALIGNED: Final = 16
_WIDE: Final = np.dtype(np.int64)


def copy_to_device(arrays: Sequence[NDArray[Any]], device: torch.device) -> tuple[Tensor, list[Tensor]]:
    """Return the memory, uint8, that holds all arrays on a device, and the arrays, int32 and int64, as views of it;
    nothing waits for what runs there."""
    starts, size = [], 0
    for array in arrays:
        starts.append(size)
        size += -(-array.nbytes // _ALIGNED) * _ALIGNED
    host = torch.empty(size, dtype=torch.uint8, pin_memory=device.type == "cuda")
    there = host.numpy()
    for array, start in zip(arrays, starts, strict=True):
        there[start : start + array.nbytes].view(array.dtype).reshape(array.shape)[...] = array
    packed = host.to(device, non_blocking=True)
    wide, narrow = packed.view(torch.int64), packed.view(torch.int32)
    return packed, [
        (wide if array.dtype == _WIDE else narrow).as_strided(
            array.shape, _strides(array.shape), start // array.itemsize
        )
        for array, start in zip(arrays, starts, strict=True)
    ]


def _strides(shape: Sequence[int]) -> tuple[int, ...]:
    return (1,) if len(shape) == 1 else (shape[1], 1)
