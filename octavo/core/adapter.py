"""Adapters (LoRA) as requests name them."""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path
from typing import Any, Final

import msgspec

from octavo.errors import InvalidRequest

MAX_NAME_CHARS: Final = 256
_NAME: Final = re.compile(r"[^\s\x00-\x1f\x7f-\x9f\ud800-\udfff@]+")
_MAX_ID: Final = 2**63 - 1


_FILES: Final = {"adapter_config.json": 1 << 20, "adapter_model.safetensors": 16 << 30}
"""The files in an adapter's folder, in the order in which they are digested, and the most bytes of each."""
_MOST_BYTES: Final = 16 << 30


def is_gguf_adapter(path: Path) -> bool:
    """Return whether an adapter is named by a file of llama.cpp, not by a folder."""
    return path.suffix == ".gguf"


def files_of(path: Path) -> dict[str, Path]:
    """Return the files of an adapter, by the names that its digest has for them, in the order of the digest."""
    return {"adapter.gguf": path} if is_gguf_adapter(path) else {name: path / name for name in _FILES}


class UnfitFile(Exception):
    """A file of an adapter cannot be read; says why, without its name."""


def open_file(path: Path) -> int:
    """Return a descriptor of a file of an adapter: a regular one, which is not too large. Raises UnfitFile."""
    most_bytes = _FILES.get(path.name, _MOST_BYTES)
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a pipe would block
    except OSError as error:
        raise UnfitFile(f"cannot be read ({error.strerror})") from error
    status = os.fstat(fd)
    if stat.S_ISREG(status.st_mode) and status.st_size <= most_bytes:
        return fd
    os.close(fd)
    if not stat.S_ISREG(status.st_mode):
        raise UnfitFile("is no regular file")
    raise UnfitFile(f"has {status.st_size:,} bytes, must have at most {most_bytes:,}")


def file_heading(name: str, size: int) -> bytes:
    """Return what stands before the content of each file in the digest of an adapter: its name, a NUL byte, and the
    length of the content in 8 bytes."""
    return name.encode() + b"\0" + size.to_bytes(8, "little")


class LoRARequest(msgspec.Struct, frozen=True):
    """An adapter that a request uses. Raises InvalidRequest for a wrong value.

    lora_name: what models, responses and metrics call it. lora_int_id: a number above 0, as vLLM has it; octavo
    identifies adapters by their contents. lora_path: the folder with adapter_config.json and the weights, or a file of
    llama.cpp, as .gguf.
    digest: SHA-256 of these files in hexadecimal digits; empty where they have not been read yet.
    """

    lora_name: str
    lora_int_id: int
    lora_path: str
    digest: str = ""

    def __post_init__(self) -> None:
        checked_adapter_name(self.lora_name, "lora_name")
        number = self.lora_int_id
        if not isinstance(number, int) or isinstance(number, bool) or not 0 < number <= _MAX_ID:
            raise InvalidRequest(f"lora_int_id is {number!r}, must be a whole number above 0", field="lora_int_id")
        if not isinstance(self.lora_path, str) or not self.lora_path or "\0" in self.lora_path:
            raise InvalidRequest(f"lora_path is {self.lora_path!r}, must be a folder or a GGUF file", field="lora_path")

    @property
    def key(self) -> str:
        """Return what identifies the adapter in prefix caches and slots: its name and the content of its files."""
        return f"{self.lora_name}@{self.digest}"


def checked_adapter_name(name: Any, field: str) -> str:
    """Return a name without spaces, control characters and @. Raises InvalidRequest."""
    if not isinstance(name, str) or len(name) > MAX_NAME_CHARS or _NAME.fullmatch(name) is None:
        shown = repr(name[:80] if isinstance(name, str) else name)
        raise InvalidRequest(
            f"{field} is {shown}, must be a name of 1 to {MAX_NAME_CHARS} characters without spaces, control "
            "characters and @",
            field=field,
        )
    return name
