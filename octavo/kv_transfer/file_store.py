"""KV blocks as files: on a disk, where they survive the engine, or in shared memory, for all replicas of a server.

A file holds one rank's part of a block in the layers of one cache group, after a header with checksums. Its name is the
block's digest; the name of its folder is a hash of everything that the bytes depend on (`folder_key`). Any number of
processes may use a folder at once, and each may be killed at any moment: a file is written under a temporary name and
renamed, and a file that fails verification counts as absent. Nothing is flushed to the disk: after a crash of the
machine the checksum finds a file that is not whole.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import re
import stat
import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final, NamedTuple

from octavo.errors import ConfigError
from octavo.kv_transfer.messages import TierFolder

_log = logging.getLogger(__name__)

_MAGIC: Final = b"octavo-kv 1\r\n\x00\x00\x00"
"""Changed with every change of the format."""
_HEADER: Final = struct.Struct("<16s32s32sIQI")
"""Magic, key of the folder, digest, cache group, bytes of the content, their CRC-32; the CRC-32 of these follows."""
_CHECKSUM: Final = struct.Struct("<I")
_USAGE: Final = struct.Struct("<Q")
_KEPT_SHARE: Final = 0.9
"""Share of the maximal size down to which old files are removed, so that scans of all files are rare."""
_FOLDER: Final = re.compile(r"[0-9a-f]{32}")
_PARTIAL: Final = ".partial"
_READ: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
"""O_NONBLOCK: opening what is no file, such as a pipe, does not wait."""


def folder_key(identity: Mapping[str, str], *, layout: str, block_size: int, **share: object) -> bytes:
    """Return 32 bytes that differ whenever the bytes of a block may differ. share: the layers and heads of a rank."""
    named = {"identity": dict(identity), "layout": layout, "block_size": block_size, **share}
    return hashlib.sha256(_MAGIC + json.dumps(named, sort_keys=True).encode()).digest()


class _File(NamedTuple):
    used: int
    size: int
    folder: int
    name: str


class FileStore:
    """The blocks with one key in a folder. All keys together have at most `max_bytes`; beyond that the least recently
    used files are removed. Reading is for one thread, writing for another one.
    """

    def __init__(self, folder: Path, key: bytes, max_bytes: int, option: str = "kv_disk") -> None:
        """Make the folder where there is none. Raises ConfigError, which names `option`, for one that is not private
        or cannot be written to."""
        self._key = key
        self._max_bytes = max_bytes
        self._num_partial = 0
        self.is_saving = True
        """Whether `write` works: it does until the first error, for example of a full disk."""
        self.path = folder / key.hex()[:32]
        try:
            self._root = open_private(folder, may_be_read=True)
            self._folder = open_private(self.path)
            self._usage = os.open("usage", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600, dir_fd=self._root)
            with self._locked():
                self._recount(keep_bytes=max_bytes)
        except OSError as error:
            raise ConfigError(
                f"{option} is {folder}, where KV blocks cannot be kept ({error.strerror}: {error.filename or folder}); "
                "name a directory of your own that no other user can write to, or one that can be made"
            ) from error

    def has(self, digest: bytes, group: int) -> bool:
        """Return whether there is a file. Its content is not verified."""
        try:
            os.stat(_name(digest, group), dir_fd=self._folder, follow_symlinks=False)
        except OSError:
            return False
        return True

    def read(self, digest: bytes, group: int, content: memoryview) -> bool:
        """Fill `content`. Returns False, with undefined content, if there is no valid file of this size; an invalid
        file is removed."""
        name = _name(digest, group)
        try:
            file = os.open(name, _READ, dir_fd=self._folder)
        except FileNotFoundError:
            return False
        except OSError as error:  # a link, or a disk that fails
            self._distrust(name, error.strerror or str(error))
            return False
        try:
            reason = self._read(file, digest, group, content)
        except OSError as error:
            reason = error.strerror or str(error)
        finally:
            os.close(file)
        if reason is not None:
            self._distrust(name, reason)
        return reason is None

    def _read(self, file: int, digest: bytes, group: int, content: memoryview) -> str | None:
        """Read the file; return the reason why it is invalid, None for a valid one."""
        header = os.read(file, _HEADER.size + _CHECKSUM.size)
        fields = header[: _HEADER.size]
        if len(header) < _HEADER.size + _CHECKSUM.size or _CHECKSUM.pack(zlib.crc32(fields)) != header[_HEADER.size :]:
            return "its header is damaged"
        magic, key, its_digest, its_group, size, checksum = _HEADER.unpack(fields)
        if (magic, key, its_digest, its_group, size) != (_MAGIC, self._key, digest, group, content.nbytes):
            return "it is another block's"
        done = 0
        while done < size:
            count = os.readv(file, [content[done:]])
            if not count:
                return "it is truncated"
            done += count
        return None if zlib.crc32(content) == checksum else "its checksum is wrong"

    def _distrust(self, name: str, reason: str) -> None:
        _log.warning("KV block %s is removed and will be computed: %s", self.path / name, reason)
        self._unlink(name)

    def write(self, digest: bytes, group: int, parts: Sequence[memoryview]) -> None:
        """Write a block's file unless it exists. The first error ends all saving, with a line in the log;
        nothing is raised."""
        name = _name(digest, group)
        if not self.is_saving or self.has(digest, group):
            return
        size = sum(part.nbytes for part in parts)
        checksum = 0
        for part in parts:
            checksum = zlib.crc32(part, checksum)
        fields = _HEADER.pack(_MAGIC, self._key, digest, group, size, checksum)
        header = fields + _CHECKSUM.pack(zlib.crc32(fields))
        try:
            if len(header) + size > self._max_bytes:
                raise OSError(0, f"a block takes {len(header) + size:,} bytes, the limit is {self._max_bytes:,}")
            partial, file = self._reserve(len(header) + size)
            try:
                _write_all(file, [memoryview(header), *parts])
                with suppress(FileNotFoundError):  # the folder was emptied meanwhile
                    os.rename(partial, name, src_dir_fd=self._folder, dst_dir_fd=self._folder)
            except BaseException:
                self._unlink(partial)
                raise
            finally:
                os.close(file)
        except OSError as error:
            self.is_saving = False
            _log.warning("no more KV blocks are saved in %s: %s", self.path, error.strerror or error)

    def touch(self, digest: bytes, group: int) -> None:
        """Mark a block's file as used now, for the order of removals."""
        with suppress(OSError):
            os.utime(_name(digest, group), dir_fd=self._folder, follow_symlinks=False)

    def remove(self, digest: bytes, group: int) -> None:
        """Remove a block's file, where there is one."""
        self._unlink(_name(digest, group))

    def close(self) -> None:
        """Close the folder; the files stay. Idempotent."""
        for descriptor in (self._root, self._folder, self._usage):
            with suppress(OSError):
                os.close(descriptor)
        self._root = self._folder = self._usage = -1

    # ---- the size ----

    def _reserve(self, size: int) -> tuple[str, int]:
        """Return the name and the descriptor of a temporary file that counts with this size from now on."""
        with self._locked():
            usage = os.pread(self._usage, _USAGE.size, 0)
            used = _USAGE.unpack(usage)[0] if len(usage) == _USAGE.size else self._max_bytes
            if used + size > self._max_bytes:
                used = self._recount(keep_bytes=int(self._max_bytes * _KEPT_SHARE) - size)
            self._num_partial += 1
            partial = f"{os.getpid()}-{self._num_partial}-{id(self)}{_PARTIAL}"
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            file = os.open(partial, flags, 0o600, dir_fd=self._folder)
            fcntl.flock(file, fcntl.LOCK_EX)  # held while this process writes the file
            os.ftruncate(file, size)
            os.pwrite(self._usage, _USAGE.pack(used + size), 0)
        return partial, file

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Exclude all other processes; a process that dies releases the lock."""
        fcntl.flock(self._usage, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(self._usage, fcntl.LOCK_UN)

    def _recount(self, keep_bytes: int) -> int:
        """Scan all files; remove unfinished ones of killed processes, and the least recently used ones until at most
        `keep_bytes` are left. Returns the remaining bytes, which are also stored."""
        files: list[_File] = []
        folders = [self._open(entry.name) for entry in os.scandir(self._root) if _FOLDER.fullmatch(entry.name)]
        try:
            for folder in folders:
                files += _files(folder)
            used = sum(file.size for file in files)
            for file in sorted(files):
                if used <= keep_bytes:
                    break
                with suppress(OSError):
                    os.unlink(file.name, dir_fd=file.folder)
                used -= file.size
        finally:
            for folder in folders:
                os.close(folder)
        os.pwrite(self._usage, _USAGE.pack(used), 0)
        return used

    def _open(self, name: str) -> int:
        return os.open(name, _READ | os.O_DIRECTORY, dir_fd=self._root)

    def _unlink(self, name: str) -> None:
        """Remove a file. Its bytes are counted until the next recount, so the folder seems fuller than it is."""
        with suppress(OSError):
            os.unlink(name, dir_fd=self._folder)


def open_store(folder: TierFolder) -> FileStore:
    """Return the store of a rank's blocks. Raises ConfigError."""
    option = "kv_disk" if folder.tier == "disk" else "kv_host_size"
    return FileStore(Path(folder.folder), folder.key, folder.max_bytes, option)


def open_private(path: Path, *, may_be_read: bool = False) -> int:
    """Return a descriptor of a directory, which is made with its parents if there is none. Raises OSError for a link,
    for a directory of another user, and for one that others may write to or, unless `may_be_read`, read.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with suppress(FileExistsError):
        path.mkdir(mode=0o700)
    descriptor = os.open(path, _READ | os.O_DIRECTORY)
    about = os.fstat(descriptor)
    others = stat.S_IMODE(about.st_mode) & (0o022 if may_be_read else 0o077)
    if about.st_uid == os.geteuid() and not others:
        return descriptor
    os.close(descriptor)
    reason = f"others may use it (mode {about.st_mode & 0o777:o})" if others else "it belongs to another user"
    raise PermissionError(1, reason, str(path))


def _files(folder: int) -> Iterator[_File]:
    for entry in os.scandir(folder):
        with suppress(OSError):  # another process may remove it at the same moment
            if entry.name.endswith(_PARTIAL) and _is_abandoned(entry.name, folder):
                os.unlink(entry.name, dir_fd=folder)
                continue
            about = entry.stat(follow_symlinks=False)
            yield _File(about.st_mtime_ns, about.st_size, folder, entry.name)


def _is_abandoned(name: str, folder: int) -> bool:
    """Return whether the process that wrote the file has died."""
    file = os.open(name, _READ, dir_fd=folder)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(file)
    return True


def _write_all(file: int, parts: list[memoryview]) -> None:
    while parts:
        written = os.writev(file, parts[:512])
        while parts and written >= parts[0].nbytes:
            written -= parts[0].nbytes
            parts = parts[1:]
        if written:
            parts = [parts[0][written:], *parts[1:]]


def _name(digest: bytes, group: int) -> str:
    return f"{digest.hex()}.{group}"
