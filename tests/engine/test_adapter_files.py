"""Adapters on disk: digests follow the content, and what is no adapter is refused by name."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from octavo.core.adapter import LoRARequest
from octavo.engine import adapter_files
from octavo.engine.adapter_files import AdapterFiles, digest_of
from octavo.errors import InvalidRequest
from tests.fakes.adapters import adapter_folder


def test_a_digest_is_of_the_contents_and_of_where_one_file_ends(tmp_path: Path) -> None:
    contents = [(b"w", b"{}"), (b"v", b"{}"), (b"w", b"{} "), (b" w", b"{}"), (b"", b"{}w")]
    digests = {digest_of(adapter_folder(tmp_path / str(i), *each)) for i, each in enumerate(contents)}
    assert len(digests) == len(contents)
    assert digest_of(adapter_folder(tmp_path / "again")) in digests


def test_files_are_read_again_only_where_they_have_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files, read = AdapterFiles(), list[str]()
    monkeypatch.setattr(adapter_files, "digest_of", lambda path: str(read.append(path) or len(read)))
    asked = LoRARequest("a", 1, str(adapter_folder(tmp_path / "a")))
    assert [files.resolve(asked).digest for _ in range(2)] == ["1", "1"]
    adapter_folder(tmp_path / "a", b"other")
    assert files.resolve(asked).digest == "2"
    assert files.resolve(LoRARequest("a", 1, "/gone", digest="3")).digest == "3"
    assert len(read) == 2


def test_a_relative_folder_is_made_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    adapter_folder(tmp_path / "a")
    monkeypatch.chdir(tmp_path)
    assert AdapterFiles().resolve(LoRARequest("a", 1, "a")).lora_path == str(tmp_path / "a")


def test_folders_that_are_known_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter_files, "_MOST_FOLDERS", 2)
    files = AdapterFiles()
    for number in range(4):
        files.resolve(LoRARequest("a", 1, str(adapter_folder(tmp_path / f"{number}"))))
    assert len(files._known) == 2


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda path: (path / "adapter_config.json").unlink(), "adapter_config.json cannot be read"),
        (lambda path: (path / "adapter_model.safetensors").unlink(), "adapter_model.safetensors cannot be read"),
        (
            lambda path: (path / "adapter_config.json").write_bytes(b" " * ((1 << 20) + 1)),
            "must have at most 1,048,576",
        ),
        (lambda path: os.truncate(path / "adapter_model.safetensors", 1 << 40), "must have at most 17,179,869,184"),
    ],
)
def test_what_is_no_adapter_is_refused_with_the_file(tmp_path: Path, damage: Callable[[Path], None], said: str) -> None:
    damage(adapter_folder(tmp_path / "a"))
    with pytest.raises(InvalidRequest, match=said) as refused:
        AdapterFiles().resolve(LoRARequest("a", 1, str(tmp_path / "a")))
    assert refused.value.field == "lora_path"


def test_a_pipe_or_a_folder_in_place_of_a_file_does_not_block(tmp_path: Path) -> None:
    path = adapter_folder(tmp_path / "a") / "adapter_model.safetensors"
    for make in (os.mkfifo, os.mkdir):
        path.unlink()
        make(path)
        with pytest.raises(InvalidRequest, match="no regular file"):
            digest_of(tmp_path / "a")
    with pytest.raises(InvalidRequest, match="cannot be read"):
        digest_of(tmp_path / "absent")
