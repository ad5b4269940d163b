"""The metadata before a tensor in a pipe. It comes from another process, so it is checked before memory is
allocated."""

from __future__ import annotations

import math
from typing import Annotated, Final

import msgspec
import torch
from torch import Tensor

from octavo.errors import PipeError

MAX_HEADER_BYTES: Final = 1 << 20
MAX_METADATA_BYTES: Final = MAX_HEADER_BYTES + 256
_MAX_DIMENSIONS: Final = 8

DTYPES: Final = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
    )
}
"""The element types that a pipe carries, by name."""


class Metadata(msgspec.Struct, frozen=True, array_like=True):
    """The tensor's type and shape, None and () without a tensor, and the header."""

    dtype: str | None
    shape: Annotated[tuple[Annotated[int, msgspec.Meta(ge=0)], ...], msgspec.Meta(max_length=_MAX_DIMENSIONS)]
    header: Annotated[bytes, msgspec.Meta(max_length=MAX_HEADER_BYTES)]

    @classmethod
    def of(cls, tensor: Tensor | None, header: bytes, max_bytes: int) -> Metadata:
        """Raises ValueError for a type, a size, a number of dimensions or a header that pipes do not support."""
        if len(header) > MAX_HEADER_BYTES:
            raise ValueError(f"a header of {len(header)} bytes, at most {MAX_HEADER_BYTES} are sent")
        if tensor is None:
            return cls(None, (), header)
        name = str(tensor.dtype).removeprefix("torch.")
        if name not in DTYPES or tensor.layout != torch.strided:
            raise ValueError(
                f"a tensor of {tensor.dtype}, {tensor.layout}; strided ones of {', '.join(DTYPES)} are sent"
            )
        if tensor.dim() > _MAX_DIMENSIONS:
            raise ValueError(f"a tensor of {tensor.dim()} dimensions, at most {_MAX_DIMENSIONS} are sent")
        if tensor.nbytes > max_bytes:
            raise ValueError(f"a tensor of {tensor.nbytes} bytes, at most {max_bytes} are sent")
        return cls(name, tuple(tensor.shape), header)

    def empty(self, max_bytes: int) -> Tensor | None:
        """Return memory for the tensor. Raises PipeError, before allocation, if it has more than `max_bytes`."""
        if self.dtype is None:
            return None
        dtype = DTYPES.get(self.dtype)
        if dtype is None:
            raise PipeError(f"a tensor of type {self.dtype[:40]!r} is announced; {', '.join(DTYPES)} are received")
        # the other dimensions are checked even beside a dimension of 0, as strides are computed from them
        num_bytes = math.prod(max(1, size) for size in self.shape) * dtype.itemsize
        if num_bytes > max_bytes:
            raise PipeError(f"a tensor of {num_bytes} bytes is announced, at most {max_bytes} are received")
        return torch.empty(self.shape, dtype=dtype)


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous tensor."""
    return tensor.view(-1).view(torch.uint8).numpy().data
