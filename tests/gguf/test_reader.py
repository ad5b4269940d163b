"""Headers are read as they are, and hostile ones are refused with file, name and place."""

from __future__ import annotations

import random
import struct
from contextlib import suppress
from pathlib import Path

import pytest

from octavo.errors import CheckpointError, UnsupportedModel
from octavo.gguf.layout import read_config
from octavo.gguf.reader import Array, read_gguf
from tests.fakes.gguf_files import entry, gguf_bytes, text

METADATA = {"general.architecture": "llama", "a": 3, "b": 0.5, "c": True, "d": ["x", "yz"], "e": [1, 2]}
TENSORS = {"t": ("F32", (2, 3), bytes(24)), "u": ("Q4_0", (2, 64), bytes(72))}
WHOLE = gguf_bytes(METADATA, TENSORS)


def write(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


@pytest.mark.parametrize("version", [2, 3])
def test_a_header_is_read(version: int, tmp_path: Path) -> None:
    file = read_gguf(write(tmp_path / "m.gguf", gguf_bytes(METADATA, TENSORS, version=version)))
    values = {key: value.values() if isinstance(value, Array) else value for key, value in file.metadata.items()}
    assert values == METADATA
    assert [(each.name, each.type, each.shape, each.nbytes) for each in file.tensors] == [
        ("t", "F32", (2, 3), 24),
        ("u", "Q4_0", (2, 64), 72),
    ]
    assert file.tensors[1].offset - file.tensors[0].offset == 32


def start(tensors: int = 0, entries: int = 0, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, entries)


def info(name: str, dims: list[int], kind: int, offset: int) -> bytes:
    return text(name) + struct.pack(f"<I{len(dims)}Q", len(dims), *dims) + struct.pack("<IQ", kind, offset)


HOSTILE = {
    "another version": (start(version=1), "has version 1"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "is big-endian"),
    "tensors without end": (start(tensors=2**63), "9,223,372,036,854,775,808 tensors"),
    "entries without end": (start(entries=2**40), "metadata entries, more than"),
    "a key of 2^63 bytes": (start(entries=1) + struct.pack("<Q", 2**63) + bytes(64), "the key of entry 0 has"),
    "a long text": (start(entries=1) + text("k") + struct.pack("<IQ", 8, 2**62) + bytes(64), "k has"),
    "a list of 2^60": (start(entries=1) + text("k") + struct.pack("<IIQ", 9, 6, 2**60) + bytes(64), "k ends at byte"),
    "texts of 2^60": (start(entries=1) + text("k") + struct.pack("<IIQ", 9, 8, 2**60) + bytes(64), "k has 1,152,"),
    "lists in lists": (start(entries=1) + text("k") + struct.pack("<IIQ", 9, 9, 1) + bytes(64), "array of type 9"),
    "an unknown value": (start(entries=1) + text("k") + struct.pack("<I", 77) + bytes(64), "k has the unknown type"),
    "a key twice": (start(entries=2) + 2 * (text("k") + entry(1)) + bytes(64), "k is there twice"),
    "no UTF-8": (start(entries=1) + struct.pack("<Q", 2) + b"\xff\xff" + bytes(64), "not UTF-8"),
    "an alignment of 0": (start(entries=1) + text("general.alignment") + entry(0) + bytes(64), "alignment is 0"),
    "five dimensions": (start(tensors=1) + info("t", [1] * 5, 0, 0) + bytes(99), "t has 5 dimensions"),
    "an unknown type": (start(tensors=1) + info("t", [32], 99, 0) + bytes(99), "t is stored as type 99"),
    "parts of blocks": (start(tensors=1) + info("t", [33], 2, 0) + bytes(99), "whole blocks of 32"),
    "no elements": (start(tensors=1) + info("t", [0], 0, 0) + bytes(99), "whole blocks"),
    "a large tensor": (start(tensors=1) + info("t", [2**62, 2**62], 0, 0) + bytes(99), "within the"),
    "an offset beyond": (start(tensors=1) + info("t", [1], 0, 2**63) + bytes(99), "within the"),
    "an odd offset": (start(tensors=1) + info("t", [1], 0, 1) + bytes(99), "a multiple of 32"),
    "an overlap": (start(tensors=2) + info("t", [9], 0, 0) + info("u", [1], 0, 32) + bytes(99), "t and u overlap"),
    "a name twice": (start(tensors=2) + info("t", [1], 0, 0) + info("t", [1], 0, 32) + bytes(99), "t is there twice"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_header_is_refused_with_its_place(name: str, tmp_path: Path) -> None:
    content, expected = HOSTILE[name]
    with pytest.raises(CheckpointError) as raised:
        read_gguf(write(tmp_path / "m.gguf", content))
    assert "m.gguf: " in str(raised.value)
    assert expected in str(raised.value)


def test_every_truncation_is_refused(tmp_path: Path) -> None:
    for size in range(0, len(WHOLE), 3):
        with pytest.raises(CheckpointError, match=r"m\d+\.gguf: "):
            read_gguf(write(tmp_path / f"m{size}.gguf", WHOLE[:size]))


def test_changed_bytes_are_read_or_refused(tmp_path: Path) -> None:
    draw = random.Random(0)
    for number in range(400):
        content = bytearray(WHOLE)
        for _ in range(draw.randint(1, 4)):
            content[draw.randrange(4, len(content))] = draw.choice((0, 1, 127, 255, draw.randrange(256)))
        path = write(tmp_path / f"m{number}.gguf", bytes(content))
        with suppress(CheckpointError, UnsupportedModel):
            read_config(read_gguf(path))


def test_files_of_a_split_model_are_read_together(tmp_path: Path) -> None:
    for number, (name, tensor) in enumerate(TENSORS.items()):
        split = {"split.no": number, "split.count": 2, "split.tensors.count": 2}
        own = METADATA if number == 0 else {}
        write(tmp_path / f"m-{number + 1:05}-of-00002.gguf", gguf_bytes({**own, **split}, {name: tensor}))
    file = read_gguf(tmp_path / "m-00001-of-00002.gguf")
    assert [(each.name, each.file.name[2:7]) for each in file.tensors] == [("t", "00001"), ("u", "00002")]
    (tmp_path / "m-00002-of-00002.gguf").unlink()
    (tmp_path / "m-00001-of-00002.gguf").touch()
    with pytest.raises(CheckpointError, match="lacks m-00002-of-00002.gguf"):
        read_gguf(tmp_path / "m-00001-of-00002.gguf")


def test_an_unknown_architecture_is_refused_with_those_that_are_there(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", gguf_bytes({"general.architecture": "rwkv7"}, {}))
    with pytest.raises(UnsupportedModel, match=r"general.architecture is 'rwkv7', expected one of llama, .*qwen2, "):
        read_config(read_gguf(path))
