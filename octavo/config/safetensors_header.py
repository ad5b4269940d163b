"""The header of a safetensors file: names, types, shapes and places of its tensors, without reading their data.

Format: 8 bytes little-endian header length, a JSON object, then the data; offsets are relative to the data's start.
Source: https://github.com/huggingface/safetensors#format.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Final

from octavo.config.section import shown
from octavo.errors import CheckpointError

# the format's own limit; a larger figure is damage, not a header
_MAX_HEADER_BYTES: Final = 100_000_000
_MOST_DIMENSIONS: Final = 16
_MOST_ELEMENTS: Final = 1 << 62
"""More than any file has."""
_LFS_POINTER: Final = b"version https://git-lfs"
_BITS: Final = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "I16": 16, "U16": 16, "F16": 16,
    "BF16": 16, "I32": 32, "U32": 32, "F32": 32, "I64": 64, "U64": 64, "F64": 64, "F4": 4, "C64": 64,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One stored tensor: `dtype` in the format's words (F32, BF16, …), `nbytes` on disk."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    file: Path
    offset: int
    """First byte of its data, counted from the start of the file."""


@dataclass(frozen=True)
class WeightFile:
    """One file that holds weights; `names` is what the index promises it holds, None without an index."""

    path: Path
    names: frozenset[str] | None = None

    @property
    def is_safetensors(self) -> bool:
        """False for a PyTorch archive (`.bin`)."""
        return self.path.suffix == ".safetensors"


def read_header(path: Path) -> dict[str, TensorInfo]:
    """Read the header of `path` and check that the file holds what it promises.

    Tensors follow each other without gaps, as the format requires. Raises CheckpointError for a truncated, damaged or
    missing file.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            prefix = file.read(len(_LFS_POINTER))
            if prefix == _LFS_POINTER:
                raise CheckpointError(f"{path}: is a Git LFS pointer, not the weights; run `git lfs pull` beside it")
            length = int.from_bytes(prefix[:8], "little")
            if not size:
                raise damaged(path, "it is empty")
            if len(prefix) < 8 or length > min(_MAX_HEADER_BYTES, size - 8):
                raise damaged(path, f"its header should be {length:,} bytes, the file has {size:,}")
            file.seek(8)
            entries = json.loads(file.read(length))
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from error
    except (ValueError, RecursionError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise damaged(path, "its header is not JSON") from error
    if not isinstance(entries, dict):
        raise damaged(path, "its header is not an object")
    data = 8 + length
    tensors = {name: _entry(path, name, entry, data) for name, entry in entries.items() if name != "__metadata__"}
    end = data
    for info in sorted(tensors.values(), key=lambda info: (info.offset, info.nbytes)):
        if info.offset != end:
            raise damaged(path, f"{info.name} begins at byte {info.offset:,}, what is before it ends at {end:,}")
        end += info.nbytes
    if size != end:
        raise damaged(path, f"it has {size:,} bytes, its header describes {end:,}")
    return tensors


def damaged(path: Path, why: str) -> CheckpointError:
    """Return the complaint that `path` is truncated or damaged."""
    return CheckpointError(f"{path}: truncated or damaged ({why}); download it again")


def _entry(path: Path, name: str, entry: Any, data: int) -> TensorInfo:
    try:
        dtype, shape, (start, end) = str(entry["dtype"]), tuple(entry["shape"]), entry["data_offsets"]
        if len(shape) > _MOST_DIMENSIONS or any(type(each) is not int or each < 0 for each in (*shape, start, end)):
            raise ValueError("a size or an offset is no whole number")
        expected_bytes = (min(prod(shape), _MOST_ELEMENTS) * _BITS[dtype] + 7) // 8
        stored_bytes = end - start
    except (KeyError, TypeError, ValueError) as error:
        raise damaged(path, f"the entry of {name} is not understood") from error
    if stored_bytes != expected_bytes:
        raise damaged(path, f"{name} has {stored_bytes:,} bytes, {dtype} {shown(shape)} needs {expected_bytes:,}")
    return TensorInfo(name, dtype, shape, expected_bytes, path, data + start)
