"""Reading weight files, and the bar beside it."""

from __future__ import annotations

from io import StringIO
from pathlib import Path

import torch
from rich.console import Console
from safetensors.torch import save_file

from octavo.models.weight_files import progress_bar, read_tensors


def test_safetensors_and_archives_hold_the_same(tmp_path: Path) -> None:
    tensors = {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(4, dtype=torch.bfloat16)}
    save_file(tensors, tmp_path / "model.safetensors")
    torch.save(tensors, tmp_path / "pytorch_model.bin")
    torch.save(tensors, tmp_path / "old.bin", _use_new_zipfile_serialization=False)
    for name in ("model.safetensors", "pytorch_model.bin", "old.bin"):
        found = dict(read_tensors(tmp_path / name))
        assert found.keys() == tensors.keys()
        assert all(torch.equal(found[key], tensors[key]) for key in tensors)


def test_the_bar_shows_how_many_bytes_are_loaded() -> None:
    console = Console(file=StringIO(), force_terminal=True, width=120)
    with progress_bar("Loading it", 2048, console) as advance:
        advance(1024)
        advance(1024)
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert "Loading it" in shown
    assert "2.0/2.0 KiB" in shown
