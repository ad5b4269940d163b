"""The content of weight files, and a cheap proof that it is unchanged. Imports no torch.

The proof is a record beside the packed weights: device, inode, size and times of every file, and the SHA-256 of its
content at that time. A file that changed shortly before the record was made proves nothing, for a second change may
leave the same times.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, Final, cast

import msgspec

_SETTLED_AFTER_NS: Final = 2_000_000_000
"""The coarsest clock of a file system in use: FAT counts in two seconds."""
_PIECE_BYTES: Final = 64 << 20
_BUFFER_BYTES: Final = 1 << 20


class Stopped(Exception):
    """Raised in background work whose event to stop was set."""


class Stamp(msgspec.Struct, frozen=True):
    """The identity, size and times of a file in its file system; times in nanoseconds."""

    device: int
    inode: int
    size: int
    modified_ns: int
    changed_ns: int

    @classmethod
    def of(cls, path: Path) -> Stamp:
        """Read the stamp of the file that `path` leads to."""
        stat = path.stat()
        return cls(stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)


class Record(msgspec.Struct, frozen=True):
    """Stamps of files as they were at `seen_ns`, and the SHA-256 of each, by name."""

    seen_ns: int
    stamps: dict[str, Stamp]
    digests: dict[str, str]

    @classmethod
    def read(cls, path: Path) -> Record | None:
        """Read the record at `path`; None where there is none that can be read."""
        try:
            return msgspec.json.decode(path.read_bytes(), type=cls)
        except (OSError, ValueError):
            return None

    def write(self, path: Path) -> None:
        """Write the record to `path`, whole or not at all. Raises OSError."""
        with replacement(path) as file:
            file.write(msgspec.json.encode(self))

    def proves(self, stamps: Mapping[str, Stamp]) -> bool:
        """Return whether files with these stamps still have the recorded content."""
        return self.stamps == dict(stamps) and is_settled(stamps, self.seen_ns)


@contextmanager
def replacement(path: Path) -> Iterator[BinaryIO]:
    """Yield a file that takes the place of `path` when the block ends without an exception."""
    descriptor, name = tempfile.mkstemp(prefix=f"{path.name}.", suffix=".partial", dir=path.parent)
    try:
        with os.fdopen(descriptor, "w+b", buffering=0) as file:
            yield cast(BinaryIO, file)
        # not synced: after a crash of the machine the checksums show what did not reach the disk
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def is_settled(stamps: Mapping[str, Stamp], now_ns: int) -> bool:
    """Return whether a change of a file after `now_ns` is certain to show in its times."""
    return all(max(each.modified_ns, each.changed_ns) + _SETTLED_AFTER_NS <= now_ns for each in stamps.values())


class WeightContent:
    """The files of one checkpoint as they were when this object was made, before any of them is read."""

    def __init__(self, paths: Iterable[Path], threads: int = 1) -> None:
        self._paths = {path.name: path for path in paths}
        self._threads = threads
        self._digests: dict[str, str] | None = None
        self.seen_ns = time.time_ns()
        self.stamps = self._stamps()

    def digests(self) -> dict[str, str]:
        """Return the SHA-256 of every file by name, computed once. Raises OSError."""
        if self._digests is None:
            self._digests = self._compute(self._threads, threading.Event())
        return self._digests

    def freeze(self) -> None:
        """Make sure that `confirmed` detects any change from now on. Raises OSError."""
        if not is_settled(self.stamps, self.seen_ns):
            self.digests()

    def confirmed(self, stop: threading.Event) -> dict[str, str] | None:
        """Compute the digests now; return None where a file has changed since this object was made.

        Raises OSError, and Stopped once `stop` is set.
        """
        now = self._compute(1, stop)
        is_same = self._stamps() == self.stamps and self._digests in (None, now)
        return now if is_same else None

    def _stamps(self) -> dict[str, Stamp]:
        return {name: Stamp.of(path) for name, path in self._paths.items()}

    def _compute(self, threads: int, stop: threading.Event) -> dict[str, str]:
        """Compute SHA-256 over the SHA-256 of every 64 MiB of each file, so that threads share a large one."""
        pieces = [
            (name, start) for name, stamp in self.stamps.items() for start in range(0, stamp.size or 1, _PIECE_BYTES)
        ]
        found: dict[str, list[bytes]] = {name: [] for name in self.stamps}
        if threads == 1:
            parts = [_digest_of_piece(self._paths[name], start, stop) for name, start in pieces]
        else:
            with ThreadPoolExecutor(threads, "octavo-digest") as pool:
                parts = list(pool.map(lambda piece: _digest_of_piece(self._paths[piece[0]], piece[1], stop), pieces))
        for (name, _), part in zip(pieces, parts, strict=True):
            found[name].append(part)
        return {name: hashlib.sha256(b"".join(parts)).hexdigest() for name, parts in found.items()}


def _digest_of_piece(path: Path, start: int, stop: threading.Event) -> bytes:
    digest = hashlib.sha256()
    buffer = memoryview(bytearray(_BUFFER_BYTES))
    with path.open("rb", buffering=0) as file:
        file.seek(start)
        left = _PIECE_BYTES
        while left:
            if stop.is_set():
                raise Stopped
            count = file.readinto(buffer[:left])
            if not count:
                break
            digest.update(buffer[:count])
            left -= count
    return digest.digest()
