"""The header of a GGUF file: metadata, and types, shapes and places of its tensors, without reading their data.

Versions 2 and 3, little-endian. Nothing that a file says is trusted: every count, length and offset is compared with
the file before it is used. Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

from __future__ import annotations

import mmap
import re
import struct
from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any, Final

from octavo.errors import CheckpointError

MAGIC: Final = b"GGUF"
TENSOR_TYPES: Final[Mapping[int, tuple[str, int, int]]] = {
    0: ("F32", 1, 4), 1: ("F16", 1, 2), 2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20), 6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24), 8: ("Q8_0", 32, 34), 10: ("Q2_K", 256, 84), 11: ("Q3_K", 256, 110), 12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176), 14: ("Q6_K", 256, 210), 15: ("Q8_K", 256, 292), 16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74), 18: ("IQ3_XXS", 256, 98), 19: ("IQ1_S", 256, 50), 20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", 256, 110), 22: ("IQ2_S", 256, 82), 23: ("IQ4_XS", 256, 136), 28: ("F64", 1, 8),
    29: ("IQ1_M", 256, 56), 30: ("BF16", 1, 2), 34: ("TQ1_0", 256, 54), 35: ("TQ2_0", 256, 66), 39: ("MXFP4", 32, 17),
}  # fmt: skip
"""Types of tensors by number: name, elements of a block, bytes of a block."""
PLAIN_TYPES: Final = tuple(name for name, block, _ in TENSOR_TYPES.values() if block == 1)
HELD_AS: Final[Mapping[str, str]] = {
    **dict.fromkeys(("Q5_0", "Q5_1", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS"), "codes in 8 bits"),
    **dict.fromkeys(("Q2_K", "Q3_K", "TQ1_0", "TQ2_0"), "codes in 4 bits"),
    **dict.fromkeys(("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S"), "dequantised"),
}
"""Types that take more memory than in the file, and the types in which they are held."""
_SCALARS: Final = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_LONGEST_NAME: Final = 1 << 16
_LONGEST_STRING: Final = 1 << 26
_MOST_ENTRIES: Final = 1 << 16
_MOST_TENSORS: Final = 1 << 18
_MOST_ELEMENTS: Final = 1 << 23
"""The most strings that all arrays of a file may have together."""
_LARGEST_ALIGNMENT: Final = 1 << 20
_SHARD: Final = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """One stored tensor."""

    name: str
    type: str
    shape: tuple[int, ...]
    """Dimensions from the outermost to the innermost; elements along the innermost one are adjacent in memory."""
    nbytes: int
    file: Path
    offset: int
    """First byte of its data, counted from the start of the file."""


class Array:
    """An array of the metadata, which is decoded when it is needed."""

    def __init__(self, path: Path, key: str, kind: int, data: bytes, count: int, end: int) -> None:
        """end: the first byte in the file behind the data."""
        self._path, self._key, self._kind, self._data, self._count = path, key, kind, data, count
        self._start = end - len(data)
        self._places: dict[str, int | None] = {}

    def values(self) -> list[Any]:
        """Return the elements. Raises CheckpointError for text that is not UTF-8."""
        if self._kind != _STRING:
            return [*struct.unpack(f"<{self._count}{_SCALARS[self._kind]}", self._data)]
        found, place = [], 0
        try:
            for _ in range(self._count):
                start = place + 8
                place = start + int.from_bytes(self._data[place:start], "little")
                found.append(self._data[start:place].decode())
        except UnicodeDecodeError as error:
            raise _damaged(self._path, f"element {len(found)} of {self._key} is not UTF-8") from error
        return found

    def number(self, place: int, shape: tuple[int, ...]) -> GGUFTensor | None:
        """Return the element at a place as a tensor of one float32; None where the array has no such element."""
        if _SCALARS.get(self._kind) != "f" or not 0 <= place < self._count:
            return None
        return GGUFTensor(self._key, "F32", shape, 4, self._path, self._start + 4 * place)

    def __repr__(self) -> str:
        """Return the elements, or their number if there are many: errors show it as the value in the file."""
        return repr(self.values()) if self._count <= 8 else f"an array of {self._count:,}"

    def place(self, text: str) -> int | None:
        """Return the place of the first element that is a text, without decoding the others; None for no such text."""
        if text not in self._places:
            self._places[text] = self._found(text.encode()) if self._kind == _STRING else None
        return self._places[text]

    def _found(self, text: bytes) -> int | None:
        if text not in self._data:
            return None
        start = 8
        for number in range(self._count):
            end = start + int.from_bytes(self._data[start - 8 : start], "little")
            if end - start == len(text) and self._data[start:end] == text:
                return number
            start = end + 8
        return None


@dataclass(frozen=True, slots=True)
class GGUFFile:
    """A model in one or several files; `path` is the first of them, which has the metadata."""

    path: Path
    metadata: Mapping[str, Any]
    """Strings, numbers and flags by key, and `Array`s."""
    tensors: tuple[GGUFTensor, ...]

    @property
    def files(self) -> tuple[Path, ...]:
        """All files, in their order."""
        return tuple(dict.fromkeys((self.path, *(tensor.file for tensor in self.tensors))))

    @property
    def is_plain(self) -> bool:
        """Whether no tensor is quantised."""
        return all(tensor.type in PLAIN_TYPES for tensor in self.tensors)

    def floats(self, name: str) -> list[float] | None:
        """Return the values of a small tensor of type F32; None where there is none. Raises CheckpointError."""
        tensor = next((each for each in self.tensors if each.name == name), None)
        if tensor is None:
            return None
        if tensor.type != "F32" or tensor.nbytes > _LONGEST_NAME:
            raise CheckpointError(f"{tensor.file}: {name} is {tensor.type} {list(tensor.shape)}, expected a few F32")
        with tensor.file.open("rb") as file:
            file.seek(tensor.offset)
            return array("f", file.read(tensor.nbytes)).tolist()


def is_gguf(path: Path) -> bool:
    """Return whether `path` is a file in this format."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(len(MAGIC)) == MAGIC


def is_first_file(path: Path) -> bool:
    """Return whether a model is opened by the name `path`: that of its only file, or of the first one."""
    name = _SHARD.fullmatch(path.name)
    return name is None or int(name[2]) == 1


def is_mmproj(path: Path) -> bool:
    """Return whether a file has, by its name, the vision encoder of a model in another one."""
    return "mmproj" in path.name.lower()


def read_gguf(path: Path) -> GGUFFile:
    """Read the header of a file, and those of its siblings where the model is split.

    Raises CheckpointError, with the place, for a file that is truncated, damaged or of another kind.
    """
    status = path.stat()
    return _read_all(path, status.st_size, status.st_mtime_ns)


def read_gguf_content(path: Path, content: bytes) -> GGUFFile:
    """Return the header of the file at `path`, whose content is given. Raises CheckpointError."""
    return _Header(path, content).read()


@lru_cache(maxsize=4)
def _read_all(path: Path, size: int, time_ns: int) -> GGUFFile:
    first = _read_one(path)
    count = first.metadata.get("split.count", 1)
    if not isinstance(count, int) or count <= 1:
        return first
    name = _SHARD.fullmatch(path.name)
    if name is None or int(name[3]) != count:
        raise CheckpointError(
            f"{path}: is one of {count} files by its metadata, expected a name such as model-00001-of-{count:05}.gguf"
        )
    paths = [path.with_name(f"{name[1]}-{number:05}-of-{name[3]}.gguf") for number in range(1, count + 1)]
    absent = [each.name for each in paths if not each.is_file()]
    if absent:
        raise CheckpointError(f"{path}: lacks {', '.join(absent[:3])} beside it ({len(absent)} of {count} files)")
    shards = [_read_one(each) for each in paths]
    for number, shard in enumerate(shards):
        if (shard.metadata.get("split.no"), shard.metadata.get("split.count")) != (number, count):
            raise _damaged(shard.path, f"split.no and split.count are not {number} and {count}")
    tensors = tuple(tensor for shard in shards for tensor in shard.tensors)
    _check_names(paths[0], tensors)
    if shards[0].metadata.get("split.tensors.count", len(tensors)) != len(tensors):
        raise _damaged(paths[0], f"split.tensors.count is not {len(tensors)}, which the {count} files hold")
    return GGUFFile(paths[0], shards[0].metadata, tensors)


def _read_one(path: Path) -> GGUFFile:
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as pages:
            return _Header(path, pages).read()
    except (OSError, ValueError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{path}: cannot be read ({error})") from error


class _Header:
    """Reads on from a place in the file that no length or count can lead beyond its end."""

    def __init__(self, path: Path, pages: mmap.mmap | bytes) -> None:
        self._path, self._pages, self._place, self._size = path, pages, 0, len(pages)
        self._num_elements = 0

    def read(self) -> GGUFFile:
        if self._take(4, "the magic number") != MAGIC:
            raise CheckpointError(f"{self._path}: is no GGUF file")
        version = self._number("I", "the version")
        if version not in (2, 3):
            why = "is big-endian" if version & 0xFFFF == 0 else f"has version {version}"
            raise CheckpointError(f"{self._path}: {why}, expected a little-endian GGUF file of version 2 or 3")
        num_tensors = self._count("tensors", _MOST_TENSORS, least_bytes=32)
        metadata = dict(self._entries(self._count("metadata entries", _MOST_ENTRIES, least_bytes=13)))
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment % 8 or not 0 < alignment <= _LARGEST_ALIGNMENT:
            raise self._error(f"general.alignment is {alignment!r}, expected a multiple of 8")
        found = [self._tensor(number) for number in range(num_tensors)]
        start = -(-self._place // alignment) * alignment
        tensors = tuple(self._placed(start, alignment, *each) for each in found)
        _check_names(self._path, tensors)
        for before, after in pairwise(sorted(tensors, key=lambda each: each.offset)):
            if before.offset + before.nbytes > after.offset:
                raise self._error(f"{before.name} and {after.name} overlap at byte {after.offset:,}")
        return GGUFFile(self._path, metadata, tensors)

    def _entries(self, count: int) -> Iterator[tuple[str, Any]]:
        seen: set[str] = set()
        for number in range(count):
            key = self._string(f"the key of entry {number}", _LONGEST_NAME)
            if key in seen:
                raise self._error(f"{key} is there twice")
            seen.add(key)
            yield key, self._value(key, self._number("I", f"the type of {key}"))

    def _value(self, key: str, kind: int) -> Any:
        if kind in _SCALARS:
            return self._number(_SCALARS[kind], key)
        if kind == _STRING:
            return self._string(key, _LONGEST_STRING)
        if kind != _ARRAY:
            raise self._error(f"{key} has the unknown type {kind}")
        kind, count = self._number("I", f"the type of {key}"), self._number("Q", f"the length of {key}")
        if kind in _SCALARS:
            data = self._take(count * struct.calcsize("<" + _SCALARS[kind]), key)
        elif kind == _STRING:
            data = self._strings(key, count)
        else:
            raise self._error(f"{key} is an array of type {kind}, expected numbers or strings")
        return Array(self._path, key, kind, data, count, self._place)

    def _strings(self, key: str, count: int) -> bytes:
        self._num_elements += count
        if self._num_elements > _MOST_ELEMENTS or count * 8 > self._size - self._place:
            raise self._error(f"{key} has {count:,} elements, more than the file or {_MOST_ELEMENTS:,}")
        start, pages = self._place, self._pages
        for _ in range(count):
            self._place += 8 + int.from_bytes(pages[self._place : self._place + 8], "little")
            if self._place > self._size:
                raise self._error(f"{key} ends behind the file")
        return pages[start : self._place]

    def _tensor(self, number: int) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string(f"the name of tensor {number}", _LONGEST_NAME)
        dims = self._number("I", f"the dimensions of {name}")
        if not 1 <= dims <= 4:
            raise self._error(f"{name} has {dims} dimensions, expected 1 to 4")
        shape = struct.unpack(f"<{dims}Q", self._take(8 * dims, f"the shape of {name}"))[::-1]
        return name, shape, self._number("I", f"the type of {name}"), self._number("Q", f"the offset of {name}")

    def _placed(
        self, start: int, alignment: int, name: str, shape: tuple[int, ...], kind: int, offset: int
    ) -> GGUFTensor:
        if kind not in TENSOR_TYPES:
            known = ", ".join(each for each, _, _ in TENSOR_TYPES.values())
            raise self._error(f"{name} is stored as type {kind}, expected one of {known}")
        type_name, block, block_bytes = TENSOR_TYPES[kind]
        if 0 in shape or shape[-1] % block:
            raise self._error(f"{name} has shape {list(shape)}, expected rows of whole blocks of {block}")
        nbytes = prod(shape) // block * block_bytes
        if offset % alignment or start + offset + nbytes > self._size:
            raise self._error(
                f"{name} has {nbytes:,} bytes at {start + offset:,}, expected a multiple of {alignment} within the "
                f"{self._size:,} of the file"
            )
        return GGUFTensor(name, type_name, shape, nbytes, self._path, start + offset)

    def _take(self, count: int, what: str) -> bytes:
        start, end = self._place, self._place + count
        if end > self._size:
            raise self._error(f"{what} ends at byte {end:,}, the file has {self._size:,}")
        self._place = end
        return self._pages[start:end]

    def _number(self, kind: str, what: str) -> Any:
        (value,) = struct.unpack("<" + kind, self._take(struct.calcsize("<" + kind), what))
        return value

    def _count(self, what: str, most: int, least_bytes: int) -> int:
        count: int = self._number("Q", f"the number of {what}")
        if count > most or count * least_bytes > self._size:
            raise self._error(f"it has {count:,} {what}, more than the file or {most:,}")
        return count

    def _string(self, what: str, longest: int) -> str:
        length = self._number("Q", f"the length of {what}")
        if length > longest:
            raise self._error(f"{what} has {length:,} bytes, expected at most {longest:,}")
        try:
            return self._take(length, what).decode()
        except UnicodeDecodeError as error:
            raise self._error(f"{what} is not UTF-8") from error

    def _error(self, why: str) -> CheckpointError:
        return _damaged(self._path, f"{why}; byte {self._place:,}")


def _check_names(path: Path, tensors: tuple[GGUFTensor, ...]) -> None:
    seen: set[str] = set()
    for tensor in tensors:
        if tensor.name in seen:
            raise _damaged(path, f"tensor {tensor.name} is there twice")
        seen.add(tensor.name)


def _damaged(path: Path, why: str) -> CheckpointError:
    return CheckpointError(f"{path}: truncated or damaged ({why}); download it again")
