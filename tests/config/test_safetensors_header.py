"""Headers of safetensors files, sound and damaged."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from octavo.config.safetensors_header import read_header
from octavo.errors import CheckpointError


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.zeros(3, 2), "b": torch.zeros(5, dtype=torch.bfloat16)}, path)
    return path


def test_a_header_says_what_the_library_wrote(file: Path) -> None:
    header = read_header(file)
    assert {name: (info.dtype, info.shape, info.nbytes) for name, info in header.items()} == {
        "a": ("F32", (3, 2), 24),
        "b": ("BF16", (5,), 10),
    }


@pytest.mark.parametrize("keep", [0, 5, 8, 60, -1])
def test_a_truncated_file_is_named(file: Path, keep: int) -> None:
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match=r"model\.safetensors: truncated or damaged .* download it again"):
        read_header(file)


def test_a_pointer_of_git_lfs_is_no_weight(file: Path) -> None:
    file.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 12\n")
    with pytest.raises(CheckpointError, match="git lfs pull"):
        read_header(file)


@pytest.mark.parametrize(
    "header",
    [
        b"not json",
        b"[]",
        json.dumps({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}).encode(),
        json.dumps({"a": {"dtype": "F77", "shape": [2], "data_offsets": [0, 8]}}).encode(),
        json.dumps({"a": {"shape": [2]}}).encode(),
        json.dumps({"a": {"dtype": "F32", "shape": [2], "data_offsets": ["x", 8]}}).encode(),
        json.dumps({"a": {"dtype": "F32", "shape": [2], "data_offsets": [-8, 0]}}).encode(),
        json.dumps({"a": {"dtype": "F32", "shape": [2.0], "data_offsets": [0, 8]}}).encode(),
        json.dumps({"a": {"dtype": "F32", "shape": [-1, -2], "data_offsets": [0, 8]}}).encode(),
        json.dumps({"a": {"dtype": "F32", "shape": [10**4000] * 9, "data_offsets": [0, 8]}}).encode(),
        json.dumps({"a": {"dtype": "F32", "shape": [1 << 60] * 999, "data_offsets": [0, 8]}}).encode(),
        json.dumps({"a": {"dtype": "F32", "shape": [2, True], "data_offsets": [False, 8]}}).encode(),
        b"[" * 100_000,
    ],
)
def test_a_damaged_header_is_named(file: Path, header: bytes) -> None:
    file.write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    with pytest.raises(CheckpointError, match="truncated or damaged"):
        read_header(file)


@pytest.mark.parametrize("change", ["gap", "overlap", "surplus", "shift"])
def test_tensors_that_do_not_fill_the_file_are_named(file: Path, change: str) -> None:
    content = file.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header, data = json.loads(content[8 : 8 + length]), content[8 + length :]
    if change == "gap":
        header["b"]["data_offsets"], data = [28, 38], data + bytes(4)
    elif change == "overlap":
        header["b"]["data_offsets"], data = [20, 30], data[:-4]
    elif change == "surplus":
        data += b"x"
    text = json.dumps(header).encode() + b" "
    shift = change == "shift"  # the data would begin one byte too early
    file.write_bytes((len(text) - shift).to_bytes(8, "little") + text + data)
    with pytest.raises(CheckpointError, match=r"model\.safetensors: truncated or damaged"):
        read_header(file)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_header(tmp_path / "model.safetensors")
