"""Packed weights on disk, from which a later start maps them instead of packing the checkpoint again.

A file is: magic, length and checksum of the header; the header, a JSON object with the identity of what was packed, the
places of its tensors and a checksum of every 16 MiB of data; the data, each tensor at a multiple of 4,096 bytes. What
is not exactly as expected is packed again and replaced, never trusted. A file is written beside its place and renamed,
so processes that start at once see a whole one or none.
"""

from __future__ import annotations

import hashlib
import json
import logging
import mmap
import os
import re
import struct
import tempfile
import time
import zlib
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, Final, cast

import torch
from torch import Tensor

from octavo.config.checkpoint import Checkpoint
from octavo.config.explain import render_bytes
from octavo.ops.prepare_linear import TensorSpec

_log = logging.getLogger(__name__)

FORMAT_VERSION: Final = 1
"""Another one for every change of this file's format, and of how models arrange tensors in their weights."""
_MAGIC: Final = b"octavo-packed\x00\r\n"
_START: Final = struct.Struct("<16sQI")
"""Magic, bytes of the header, its CRC-32."""
_ALIGNMENT: Final = 4096
_PIECE_BYTES: Final = 16 << 20
"""What a checksum covers, and what is written at once: large writes give the file large pages in the page cache."""
_ABANDONED_AFTER_S: Final = 3600.0


class PackedCache:
    """The file in `directory` for weights of one `identity`. `threads` compute checksums.

    `identity` says all that decides the bytes, as JSON; `title` is what people call the model. The directory is made if
    need be. Raises OSError when it cannot.
    """

    def __init__(self, directory: Path, title: str, identity: Mapping[str, Any], threads: int = 1) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._identity = json.loads(json.dumps({"format": FORMAT_VERSION, **identity}))
        self._threads = threads
        # what a file may be replaced by is another version of the same: the same place, type and format
        place = json.dumps([self._identity.get(key) for key in ("checkpoint", "dtype", "method", "layout", "ranks")])
        digest = hashlib.sha256(place.encode()).hexdigest()[:12]
        self.path = directory / f"{re.sub(r'[^A-Za-z0-9._-]+', '-', title)}-{digest}.packed"

    def read(self, specs: Mapping[str, TensorSpec]) -> dict[str, Tensor] | None:
        """The tensors that meet `specs`, mapped; None where they are not there or not trusted, which is logged."""
        try:
            file = self.path.open("rb")
        except FileNotFoundError:
            return None
        except OSError as error:
            self._warn(f"cannot be read ({error.strerror})")
            return None
        with file:
            try:
                return self._read(file, specs)
            except _Distrust as reason:
                self._warn(str(reason))
                return None

    def write(self, state: Mapping[str, Tensor]) -> None:
        """Keep `state` for later starts. A disk that does not take it is logged: the weights are in memory anyway."""
        started = time.monotonic()
        try:
            self._remove_abandoned()
            with self._replacement() as file:
                size = self._write(file, state)
        except OSError as error:
            _log.warning("packed weights are not kept in %s: %s", self.path, error.strerror or error)
            return
        _log.info("packed weights kept in %s (%s, %.1f s)", self.path, render_bytes(size), time.monotonic() - started)

    def _read(self, file: BinaryIO, specs: Mapping[str, TensorSpec]) -> dict[str, Tensor]:
        started = time.monotonic()
        size = os.fstat(file.fileno()).st_size
        header, length = _read_header(file, size)
        if header.get("identity") != self._identity:
            raise _Distrust(f"is stale: {_difference(header.get('identity'), self._identity)}")
        places, data = header["tensors"], _aligned(_START.size + length)
        promised = {name: (list(spec.shape), _name(spec.dtype)) for name, spec in specs.items()}
        if {name: (place["shape"], place["dtype"]) for name, place in places.items()} != promised:
            raise _Distrust("holds other tensors than this version wants")
        if size != header["size"]:
            raise _Distrust(f"is truncated: {size:,} bytes of {header['size']:,}")
        # private, so that nothing can reach the file: torch wants memory that it could write to
        try:
            pages = mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        except OSError as error:
            raise _Distrust(f"cannot be mapped ({error.strerror})") from error
        if hasattr(mmap, "MADV_HUGEPAGE"):
            pages.madvise(mmap.MADV_HUGEPAGE)
        if self._checksums(pages, data) != header["checksums"]:
            raise _Distrust("is damaged: its checksum is wrong")
        tensors = {name: _view(pages, specs[name], place["offset"]) for name, place in places.items()}
        seconds = time.monotonic() - started
        _log.info("packed weights mapped from %s (%s, %.1f s)", self.path, render_bytes(size), seconds)
        return tensors

    def _write(self, file: BinaryIO, state: Mapping[str, Tensor]) -> int:
        specs = {name: TensorSpec.of(tensor) for name, tensor in state.items()}
        # places depend on the length of the header and it on them, so it is laid out for the largest numbers first
        header = self._header(specs, data=1 << 62, checksums="")
        total = sum(_aligned(spec.nbytes) for spec in specs.values())
        num_pieces = 2 + total // _PIECE_BYTES
        data = _aligned(_START.size + len(header) + 8 * num_pieces)
        parts = ((offset, _bytes(state[name])) for name, offset in _offsets(specs, data) if specs[name].nbytes)
        checksums = _stream(file, data, data + total, parts)
        header = self._header(specs, data, checksums).ljust(data - _START.size)
        assert _START.size + len(header) == data, "the header outgrew its place"
        _write_all(file, 0, _START.pack(_MAGIC, len(header), zlib.crc32(header)) + header)
        return data + total

    def _header(self, specs: Mapping[str, TensorSpec], data: int, checksums: str) -> bytes:
        tensors = {
            name: {"shape": list(specs[name].shape), "dtype": _name(specs[name].dtype), "offset": offset}
            for name, offset in _offsets(specs, data)
        }
        size = data + sum(_aligned(spec.nbytes) for spec in specs.values())
        return json.dumps(
            {"identity": self._identity, "tensors": tensors, "size": size, "checksums": checksums}
        ).encode()

    def _checksums(self, pages: mmap.mmap, data: int) -> str:
        """CRC-32 of every piece of the file, the first one from byte `data` on; 8 hexadecimal digits each."""
        with memoryview(pages) as view, ThreadPoolExecutor(self._threads, "octavo-checksum") as pool:
            starts = range(0, len(view), _PIECE_BYTES)
            return _hexadecimal(
                pool.map(lambda start: zlib.crc32(view[max(start, data) : start + _PIECE_BYTES]), starts)
            )

    @contextmanager
    def _replacement(self) -> Iterator[BinaryIO]:
        """A file that takes the place of ours when the block ends well."""
        descriptor, name = tempfile.mkstemp(prefix=f"{self.path.name}.", suffix=".partial", dir=self.path.parent)
        try:
            with os.fdopen(descriptor, "w+b", buffering=0) as file:
                yield cast(BinaryIO, file)
                os.fsync(file.fileno())
            Path(name).replace(self.path)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise

    def _remove_abandoned(self) -> None:
        """Files of processes that were killed while they wrote."""
        for path in self.path.parent.glob(f"{self.path.name}.*.partial"):
            # another process may finish or remove it at the same moment
            with suppress(FileNotFoundError):
                if time.time() - path.stat().st_mtime > _ABANDONED_AFTER_S:
                    path.unlink()

    def _warn(self, reason: str) -> None:
        _log.warning("%s %s; the checkpoint is packed again", self.path, reason)


def identity_of(checkpoint: Checkpoint, *, dtype: torch.dtype, method: str, layout: str, ranks: str) -> dict[str, Any]:
    """All that decides the bytes of a packed model: which files, as they are now, and what is made of them.

    `method` is how weights are held, `layout` the order of the packed bytes, `ranks` whose share of how many this is.
    """
    stats = {file.path.name: file.path.stat() for file in checkpoint.weight_files()}
    return {
        "checkpoint": str(checkpoint.path.resolve()),
        "files": {name: [stat.st_size, stat.st_mtime_ns] for name, stat in stats.items()},
        "config": hashlib.sha256(json.dumps(checkpoint.config, sort_keys=True).encode()).hexdigest(),
        "dtype": _name(dtype),
        "method": method,
        "layout": layout,
        "ranks": ranks,
    }


class _Distrust(Exception):
    """Why a file is not used."""


def _read_header(file: BinaryIO, size: int) -> tuple[dict[str, Any], int]:
    start = file.read(_START.size)
    if len(start) < _START.size:
        raise _Distrust(f"is truncated: {size:,} bytes")
    magic, length, checksum = _START.unpack(start)
    if magic != _MAGIC:
        raise _Distrust("is no file of packed weights")
    if length > size:
        raise _Distrust(f"is truncated: {size:,} bytes")
    header = file.read(length)
    if zlib.crc32(header) != checksum:
        raise _Distrust("is damaged: the checksum of its header is wrong")
    return json.loads(header), length


def _difference(found: Any, wanted: Mapping[str, Any]) -> str:
    for key, value in wanted.items():
        if not isinstance(found, dict) or found.get(key) != value:
            return f"its {key} is another"
    return "it says more than it should"


def _offsets(specs: Mapping[str, TensorSpec], data: int) -> Iterator[tuple[str, int]]:
    for name, spec in specs.items():
        yield name, data
        data += _aligned(spec.nbytes)


def _stream(file: BinaryIO, data: int, end: int, parts: Iterable[tuple[int, memoryview]]) -> str:
    """Write parts at their ascending offsets, zeros between them, from byte `data` to `end`; answers the checksums."""
    pieces = [(start, min(start + _PIECE_BYTES, end)) for start in range(0, end, _PIECE_BYTES)]
    checksums = []
    left = iter(parts)
    offset, part = next(left, (end, memoryview(b"")))
    for start, stop in pieces:
        piece = bytearray(stop - start)
        while offset < stop:
            count = min(stop - offset, len(part))
            piece[offset - start : offset - start + count] = part[:count]
            offset, part = offset + count, part[count:]
            if not part:
                offset, part = next(left, (end, part))
        checksums.append(zlib.crc32(memoryview(piece)[max(0, data - start) :]))
        _write_all(file, start, piece)
    return _hexadecimal(checksums)


def _hexadecimal(checksums: Iterable[int]) -> str:
    return "".join(f"{checksum:08x}" for checksum in checksums)


def _write_all(file: BinaryIO, offset: int, content: bytes | bytearray) -> None:
    left = memoryview(content)
    file.seek(offset)
    while left:
        left = left[file.write(left) :]


def _view(pages: mmap.mmap, spec: TensorSpec, offset: int) -> Tensor:
    if not spec.nbytes:
        return torch.empty(spec.shape, dtype=spec.dtype)
    count = spec.nbytes // spec.dtype.itemsize
    return torch.frombuffer(pages, dtype=spec.dtype, count=count, offset=offset).view(spec.shape)


def _bytes(tensor: Tensor) -> memoryview:
    return memoryview(tensor.contiguous().view(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]


def _aligned(count: int) -> int:
    return -(-count // _ALIGNMENT) * _ALIGNMENT


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
