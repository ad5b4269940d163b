"""Vectors as responses have them: numbers, base64 text of their bytes, or the bytes alone, in one of several types."""

from __future__ import annotations

import sys
from base64 import b64encode
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from msgspec import Raw, Struct, json

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

BINARY: Final = ("bytes", "bytes_only")
"""Formats whose response is bytes, with a header that describes them and without it."""
MOST_DESCRIBED: Final = 512
"""Arrays that a header describes: clients refuse lines of more than 64 KiB."""
_SLICE: Final = 4096
"""Numbers that are encoded in one call, which nothing else of the process runs beside."""


class Encoding(Struct, frozen=True, kw_only=True):
    """How a request wants vectors. type: "float32", "float16" or "bfloat16". order: "native", "little" or "big"."""

    format: str = "float"
    type: str = "float32"
    order: str = "native"

    def value(self, array: NDArray[np.float32]) -> Raw | str:
        return b64encode(self.binary(array)).decode() if self.format == "base64" else Raw(_numbers(array))

    def binary(self, array: NDArray[np.float32]) -> bytes:
        import numpy as np

        if self.type == "bfloat16":
            bits = array.astype(np.float32).view(np.uint32)
            # rounded to the nearest, ties to even
            given: NDArray[Any] = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
        else:
            given = array.astype(np.dtype(self.type))
        is_swapped = self.order not in ("native", sys.byteorder)
        return (given.byteswap() if is_swapped else given).tobytes()

    def joined(self, arrays: Sequence[NDArray[np.float32]]) -> tuple[bytes, list[dict[str, Any]]]:
        """Return the bytes of all arrays, and for each where they are and what it is."""
        parts = [self.binary(array) for array in arrays]
        described, start = [], 0
        for index, (array, part) in enumerate(zip(arrays, parts, strict=True)):
            place = {"index": index, "start": start, "end": start + len(part), "shape": list(array.shape)}
            described.append(place | {"embed_dtype": self.type, "endianness": self.order})
            start += len(part)
        return b"".join(parts), described


def _numbers(array: NDArray[np.float32]) -> bytes:
    """Return the JSON of an array, [size] or [rows, size], of which no more than a slice becomes objects at once."""
    if array.ndim > 1:
        parts = [_numbers(row) for row in array]
    else:
        parts = [json.encode(array[n : n + _SLICE].tolist())[1:-1] for n in range(0, len(array), _SLICE)]
    return b"[" + b",".join(parts) + b"]"
