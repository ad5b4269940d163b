"""The file of packed weights: written whole, mapped, and trusted only where every checksum is right. Imports no torch.

A file is: magic, length and checksum of the header; the header, a JSON object with the identity of what was packed, the
places of its tensors and a checksum of every 16 MiB of data; the data, each tensor at a multiple of 4,096 bytes. A file
is written beside its place and renamed, so processes that start at once see a whole one or none.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
import tempfile
import threading
import time
import zlib
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, Final, cast

from octavo.models.content import Stopped

_MAGIC: Final = b"octavo-packed\x00\r\n"
_START: Final = struct.Struct("<16sQI")
"""Magic, bytes of the header, its CRC-32."""
_ALIGNMENT: Final = 4096
_PIECE_BYTES: Final = 16 << 20
"""What a checksum covers, and what is written at once: large writes give the file large pages in the page cache."""
_ABANDONED_AFTER_S: Final = 3600.0
_pwritev = os.pwritev
_ZEROS: Final = memoryview(bytes(_ALIGNMENT))


class Distrust(Exception):
    """Why a file is not used."""


class PackedFile:
    """A file whose header is sound; its data, mapped in `pages`, once `verify` has returned."""

    def __init__(self, path: Path, header: dict[str, Any], pages: mmap.mmap, data: int) -> None:
        self.path = path
        self.header = header
        self.pages = pages
        self._data = data
        self._lock = threading.Lock()
        self._is_sound: bool | None = None

    @classmethod
    def open(cls, path: Path) -> PackedFile:
        """Map the file at `path`. Raises FileNotFoundError, and Distrust for whatever else is wrong."""
        try:
            with path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                header, length = _read_header(file, size)
                if size != header["size"]:
                    raise Distrust(f"is truncated: {size:,} bytes of {header['size']:,}")
                return cls(path, header, _mapped(file), _aligned(_START.size + length))
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
                self._is_sound = self._checksums(threads) == self.header["checksums"]
        if not self._is_sound:
            raise Distrust("is damaged: its checksum is wrong")

    def _checksums(self, threads: int) -> str:
        """Return the CRC-32 of every piece of the file, the first one from its first byte of data on; 8 digits each."""
        with memoryview(self.pages) as view, ThreadPoolExecutor(threads, "octavo-checksum") as pool:
            starts = range(0, len(view), _PIECE_BYTES)
            return _hexadecimal(
                pool.map(lambda start: zlib.crc32(view[max(start, self._data) : start + _PIECE_BYTES]), starts)
            )


def read_identity(path: Path) -> dict[str, Any] | None:
    """What the file at `path` says that it was made of; None where it is no sound file."""
    try:
        with path.open("rb") as file:
            header, _ = _read_header(file, os.fstat(file.fileno()).st_size)
    except (OSError, Distrust):
        return None
    identity = header.get("identity")
    return identity if isinstance(identity, dict) else None


def write_packed(
    path: Path,
    identity: Mapping[str, Any],
    tensors: Mapping[str, tuple[list[int], str, memoryview]],
    stop: threading.Event | None = None,
) -> int:
    """Write `tensors`, each (shape, type, bytes), to `path`, and return the size of the file.

    Raises OSError, and Stopped once `stop` is set; nothing is left then.
    """
    _remove_abandoned(path)
    with _replacement(path) as file:
        # places depend on the length of the header and it on them, so it is laid out for the largest numbers first
        header = _header(identity, tensors, data=1 << 62, checksums="")
        total = sum(_aligned(content.nbytes) for _, _, content in tensors.values())
        num_pieces = 2 + total // _PIECE_BYTES
        data = _aligned(_START.size + len(header) + 8 * num_pieces)
        contents = (content for _, _, content in tensors.values())
        checksums = _stream(file, data, contents, stop)
        header = _header(identity, tensors, data, checksums).ljust(data - _START.size)
        assert _START.size + len(header) == data, "the header outgrew its place"
        _write_all(file, 0, [memoryview(_START.pack(_MAGIC, len(header), zlib.crc32(header)) + header)])
    return data + total


def packed_bytes(sizes: Iterable[int]) -> int:
    """About how large a file of tensors of these sizes is."""
    return sum(_aligned(size) for size in sizes) + (1 << 20)


def _header(
    identity: Mapping[str, Any], tensors: Mapping[str, tuple[list[int], str, memoryview]], data: int, checksums: str
) -> bytes:
    places, end = {}, data
    for name, (shape, dtype, content) in tensors.items():
        places[name] = {"shape": shape, "dtype": dtype, "offset": end}
        end += _aligned(content.nbytes)
    return json.dumps({"identity": identity, "tensors": places, "size": end, "checksums": checksums}).encode()


def _stream(file: BinaryIO, data: int, contents: Iterable[memoryview], stop: threading.Event | None) -> str:
    """Write contents from byte `data` on, each at the next multiple of 4,096, and return the checksums of all pieces.

    No content is copied: the interpreter's lock is free while a piece is written or summed up.
    """
    checksums: list[int] = []
    start, room = data, _PIECE_BYTES - data % _PIECE_BYTES
    checksums += [0] * (data // _PIECE_BYTES)
    piece: list[memoryview] = []

    def flush() -> None:
        nonlocal start, room, piece
        if stop is not None and stop.is_set():
            raise Stopped
        checksum = 0
        for part in piece:
            checksum = zlib.crc32(part, checksum)
        checksums.append(checksum)
        _write_all(file, start, piece)
        start += sum(part.nbytes for part in piece)
        room, piece = _PIECE_BYTES, []

    for content in contents:
        padding = _ZEROS[: -content.nbytes % _ALIGNMENT]
        for left in (content, padding):
            while left:
                part, left = left[:room], left[room:]
                piece.append(part)
                room -= part.nbytes
                if not room:
                    flush()
    if piece:
        flush()
    return _hexadecimal(checksums)


def _write_all(file: BinaryIO, offset: int, parts: list[memoryview]) -> None:
    while parts:
        written = _pwritev(file.fileno(), parts[:512], offset)
        offset += written
        while parts and written >= parts[0].nbytes:
            written -= parts[0].nbytes
            parts = parts[1:]
        if written:
            parts = [parts[0][written:], *parts[1:]]


@contextmanager
def _replacement(path: Path) -> Iterator[BinaryIO]:
    """A file that takes the place of `path` when the block ends well."""
    descriptor, name = tempfile.mkstemp(prefix=f"{path.name}.", suffix=".partial", dir=path.parent)
    try:
        with os.fdopen(descriptor, "w+b", buffering=0) as file:
            yield cast(BinaryIO, file)
        # not synced: after a crash of the machine the checksums tell what did not reach the disk
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def _remove_abandoned(path: Path) -> None:
    """Remove files of processes that were killed while they wrote."""
    for partial in path.parent.glob(f"{path.name}.*.partial"):
        # another process may finish or remove it at the same moment
        with suppress(FileNotFoundError):
            if time.time() - partial.stat().st_mtime > _ABANDONED_AFTER_S:
                partial.unlink()


def _mapped(file: BinaryIO) -> mmap.mmap:
    # private, so that nothing can reach the file: torch wants memory that it could write to
    try:
        pages = mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    except OSError as error:
        raise Distrust(f"cannot be mapped ({error.strerror})") from error
    if hasattr(mmap, "MADV_HUGEPAGE"):
        pages.madvise(mmap.MADV_HUGEPAGE)
    return pages


def _read_header(file: BinaryIO, size: int) -> tuple[dict[str, Any], int]:
    start = file.read(_START.size)
    if len(start) < _START.size:
        raise Distrust(f"is truncated: {size:,} bytes")
    magic, length, checksum = _START.unpack(start)
    if magic != _MAGIC:
        raise Distrust("is no file of packed weights")
    if length > size:
        raise Distrust(f"is truncated: {size:,} bytes")
    header = file.read(length)
    if zlib.crc32(header) != checksum:
        raise Distrust("is damaged: the checksum of its header is wrong")
    return json.loads(header), length


def _hexadecimal(checksums: Iterable[int]) -> str:
    return "".join(f"{checksum:08x}" for checksum in checksums)


def _aligned(count: int) -> int:
    return -(-count // _ALIGNMENT) * _ALIGNMENT
