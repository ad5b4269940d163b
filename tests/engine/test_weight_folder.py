"""Weights in memory as a folder: whose it is, and when it is removed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from octavo.engine import weight_folder
from octavo.engine.weight_folder import WeightFolder

PROGRAM = """
import os, signal, sys
from pathlib import Path
import torch
from octavo.engine import weight_folder
weight_folder._IN_MEMORY = Path(sys.argv[1])
folder = weight_folder.WeightFolder(Path(sys.argv[2]), [("a", torch.ones(3))])
os.kill(os.getpid(), signal.SIGKILL if sys.argv[3] == "killed" else 0)
"""


@pytest.mark.parametrize(("end", "left"), [("ended", 0), ("killed", 1)])
def test_a_folder_is_removed_with_its_program_or_after_it(
    end: str, left: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint, memory = tmp_path / "checkpoint", tmp_path / "memory"
    checkpoint.mkdir()
    memory.mkdir()
    (checkpoint / "config.json").write_text("{}")
    monkeypatch.setattr(weight_folder, "_IN_MEMORY", memory)
    used = WeightFolder(checkpoint, {"a": torch.ones(3)})
    subprocess.run([sys.executable, "-c", PROGRAM, str(memory), str(checkpoint), end], check=False)
    assert len(list(memory.iterdir())) == 1 + left
    other = WeightFolder(checkpoint, {"a": torch.ones(3)})
    assert {*memory.iterdir()} == {used.path, other.path}
    assert sorted(each.name for each in used.path.iterdir()) == [".users", "config.json", "model.safetensors"]
    used.close()
    del other
    assert not list(memory.iterdir())
    assert (checkpoint / "config.json").exists()
