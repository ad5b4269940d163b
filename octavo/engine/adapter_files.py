"""Adapters on disk: the digest of each folder's files."""

from __future__ import annotations

import hashlib
import os
from collections import OrderedDict
from os.path import expanduser
from pathlib import Path
from threading import Lock
from typing import Final

import msgspec

from octavo.core.adapter import LoRARequest, UnfitFile, file_heading, files_of, open_file
from octavo.errors import InvalidRequest

_CHUNK_BYTES: Final = 1 << 20
_MOST_FOLDERS: Final = 4096

_Signature = tuple[tuple[int, ...], ...]


class AdapterFiles:
    """Gives requests the digests of their adapters. The files of a folder are read again only where they have changed.
    Safe to use from several threads."""

    def __init__(self) -> None:
        self._known: OrderedDict[str, tuple[_Signature, str]] = OrderedDict()
        self._lock = Lock()

    def resolve(self, adapter: LoRARequest) -> LoRARequest:
        """Return the adapter with the digest of its files and its folder's absolute path. Reads the files; large ones
        take seconds. Raises InvalidRequest."""
        if adapter.digest:
            return adapter
        folder = str(Path(expanduser(adapter.lora_path)).absolute())
        signature = _signature(folder)
        with self._lock:
            known = self._known.get(folder)
        if known is None or known[0] != signature:
            known = signature, digest_of(folder)
            with self._lock:
                self._known[folder] = known
                if len(self._known) > _MOST_FOLDERS:
                    self._known.popitem(last=False)
        return msgspec.structs.replace(adapter, lora_path=folder, digest=known[1])


def digest_of(folder: str | Path) -> str:
    """Return the SHA-256 of an adapter's files in hexadecimal digits: of `file_heading` and content of each. Raises
    InvalidRequest."""
    digest = hashlib.sha256()
    for name, path in files_of(Path(folder)).items():
        fd = _open(path)
        with os.fdopen(fd, "rb") as file:
            size = os.fstat(fd).st_size
            digest.update(file_heading(name, size))
            left = size
            while left and (chunk := file.read(min(left, _CHUNK_BYTES))):
                digest.update(chunk)
                left -= len(chunk)
        if left:
            raise _refusal(path, "has become shorter while it was read")
    return digest.hexdigest()


def _signature(folder: str) -> _Signature:
    found = []
    for path in files_of(Path(folder)).values():
        fd = _open(path)
        try:
            status = os.fstat(fd)
        finally:
            os.close(fd)
        found.append((status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns))
    return tuple(found)


def _open(path: Path) -> int:
    """Return a descriptor of a file. Raises InvalidRequest."""
    try:
        return open_file(path)
    except UnfitFile as error:
        raise _refusal(path, str(error)) from error


def _refusal(path: Path, why: str) -> InvalidRequest:
    return InvalidRequest(
        f"lora_path is {str(path.parent)!r}: {path.name} {why}; give a folder that PEFT has saved an adapter to, as "
        "safetensors, or an adapter of llama.cpp, as .gguf",
        field="lora_path",
    )
