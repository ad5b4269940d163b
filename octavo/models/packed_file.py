"""The file of packed weights: written whole, mapped, and trusted only where every checksum is right. Imports no torch.

A file is: the data, each tensor at a multiple of 4,096 bytes and filled up with zeros to the next one; a JSON object
with the identity of what was packed and the places, types and checksums of its tensors; magic, length and checksum of
that object. A file is written beside its place and renamed, so processes that start at once see a whole one or none.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
import threading
import time
import zlib
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, Final

from octavo.models.content import Stopped, replacement

_MAGIC: Final = b"octavo-packed\x00\r\n"
_END: Final = struct.Struct("<QI16s")
"""Bytes of the JSON object, its CRC-32, magic."""
_ALIGNMENT: Final = 4096
_PIECE_BYTES: Final = 16 << 20
"""The bytes that one checksum covers, and that are written at once: large writes give the file large pages in the page
cache."""
_ABANDONED_AFTER_S: Final = 3600.0
_writev = os.writev
_ZEROS: Final = memoryview(bytes(_ALIGNMENT))


class Distrust(Exception):
    """Raised with the reason why a file is not used."""


class PackedFile:
    """A file whose header is sound; its data, mapped in `pages`, once `verify` has returned."""

    def __init__(self, path: Path, header: dict[str, Any], pages: mmap.mmap) -> None:
        self.path = path
        self.header = header
        self.pages = pages
        self._lock = threading.Lock()
        self._is_sound: bool | None = None

    @classmethod
    def open(cls, path: Path) -> PackedFile:
        """Map the file at `path`. Raises FileNotFoundError, and Distrust for every other fault."""
        try:
            with path.open("rb") as file:
                return cls(path, _read_header(file), _mapped(file))
        except FileNotFoundError:
            raise
        except NotADirectoryError as error:
            raise FileNotFoundError(error.errno, error.strerror, str(path)) from error
        except OSError as error:
            raise Distrust(f"cannot be read ({error.strerror})") from error

    def verify(self, threads: int) -> None:
        """Compare all checksums, the first time that this is called. Raises Distrust."""
        with self._lock:
            if self._is_sound is None:
                self._is_sound = self._checksums(threads) == [
                    checksum for place in self.header["tensors"].values() for checksum in place["checksums"]
                ]
        if not self._is_sound:
            raise Distrust("is damaged: its checksum is wrong")

    def _checksums(self, threads: int) -> list[int]:
        """Return the CRC-32 of every piece of every tensor with the zeros behind it."""
        places = self.header["tensors"].values()
        pieces = [piece for place in places for piece in _pieces(place["offset"], _aligned(place["nbytes"]))]
        with memoryview(self.pages) as view, ThreadPoolExecutor(threads, "octavo-checksum") as pool:
            return list(pool.map(lambda piece: zlib.crc32(view[piece[0] : piece[1]]), pieces))


def read_identity(path: Path) -> dict[str, Any] | None:
    """Return the identity of what the file at `path` was made of; None where the file is damaged or absent."""
    try:
        with path.open("rb") as file:
            identity = _read_header(file).get("identity")
    except (OSError, Distrust):
        return None
    return identity if isinstance(identity, dict) else None


def write_packed(
    path: Path,
    identity: Mapping[str, Any],
    tensors: Mapping[str, tuple[list[int], str, memoryview]],
    stop: threading.Event | None = None,
) -> int:
    """Write `tensors`, each (shape, type, bytes), to `path`, and return the size of the file.

    Raises OSError, and Stopped once `stop` is set; nothing is left then. No tensor is copied: the interpreter's lock is
    free while a piece is written or summed up.
    """
    _remove_abandoned(path)
    places: dict[str, dict[str, Any]] = {}
    offset = 0
    with replacement(path) as file:
        for name, (shape, dtype, content) in tensors.items():
            size = _aligned(content.nbytes)
            checksums = []
            for start, end in _pieces(offset, size):
                if stop is not None and stop.is_set():
                    raise Stopped
                piece = content[start - offset : end - offset]
                padding = _ZEROS[: end - start - piece.nbytes]
                checksums.append(zlib.crc32(padding, zlib.crc32(piece)))
                _write_all(file, [piece, padding])
            places[name] = {"shape": shape, "dtype": dtype, "offset": offset, "nbytes": content.nbytes}
            places[name]["checksums"] = checksums
            offset += size
        header = json.dumps({"identity": identity, "tensors": places, "size": offset}).encode()
        end_of_file = _END.pack(len(header), zlib.crc32(header), _MAGIC)
        _write_all(file, [memoryview(header), memoryview(end_of_file)])
    return offset + len(header) + len(end_of_file)


def packed_bytes(sizes: Iterable[int]) -> int:
    """Return the approximate bytes of a file of tensors of these sizes."""
    return sum(_aligned(size) for size in sizes) + (1 << 20)


def _pieces(offset: int, size: int) -> Iterator[tuple[int, int]]:
    """Yield (start, end) of the parts of a tensor that lie in the same piece of the file."""
    start, last = offset, offset + size
    while start < last:
        end = min(last, (start // _PIECE_BYTES + 1) * _PIECE_BYTES)
        yield start, end
        start = end


def _write_all(file: BinaryIO, parts: list[memoryview]) -> None:
    while parts:
        written = _writev(file.fileno(), parts)
        while parts and written >= parts[0].nbytes:
            written -= parts[0].nbytes
            parts = parts[1:]
        if written:
            parts = [parts[0][written:], *parts[1:]]


def _remove_abandoned(path: Path) -> None:
    """Remove files of processes that were killed while they wrote."""
    for partial in path.parent.glob(f"{path.name}.*.partial"):
        # another process may finish or remove it at the same moment
        with suppress(FileNotFoundError):
            if time.time() - partial.stat().st_mtime > _ABANDONED_AFTER_S:
                partial.unlink()


def _mapped(file: BinaryIO) -> mmap.mmap:
    # private, so that nothing can reach the file: torch requires memory that it could write to
    try:
        pages = mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    except OSError as error:
        raise Distrust(f"cannot be mapped ({error.strerror})") from error
    if hasattr(mmap, "MADV_HUGEPAGE"):
        pages.madvise(mmap.MADV_HUGEPAGE)
    return pages


def _read_header(file: BinaryIO) -> dict[str, Any]:
    size = os.fstat(file.fileno()).st_size
    if size < _END.size:
        raise Distrust(f"is truncated: {size:,} bytes")
    file.seek(size - _END.size)
    length, checksum, magic = _END.unpack(file.read(_END.size))
    if magic != _MAGIC or length > size - _END.size:
        raise Distrust("is truncated, or no file of packed weights")
    file.seek(size - _END.size - length)
    header = file.read(length)
    if zlib.crc32(header) != checksum:
        raise Distrust("is damaged: the checksum of its header is wrong")
    found: dict[str, Any] = json.loads(header)
    if size != found["size"] + length + _END.size:
        raise Distrust(f"is damaged: {size:,} bytes")
    return found


def _aligned(count: int) -> int:
    return -(-count // _ALIGNMENT) * _ALIGNMENT
