"""`octavo quantize` as people call it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from octavo import LLM
from tests.cli.conftest import Command


def test_perplexity_before_and_after(tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("octavo.cli.quantize._FOREIGN", 1.0)
    text = tmp_path / "text.txt"
    text.write_text("Once upon a time there was a bear.\n\nThe bear went to the lake, and the lake was cold.\n")
    out = tmp_path / "out"
    words = ["quantize", "octavo-tiny", str(out), "--format", "int4", "--group-size", "32", "--text", str(text)]
    said = command(*words, "--num-gpu-blocks-override", "64").out
    found = re.search(r"perplexity per token: ([\d.]+) before, ([\d.]+) after", said)
    assert found is not None
    assert "the model does not know this text" in said
    assert 0.8 < float(found[2]) / float(found[1]) < 1.2
    with LLM(model=str(out), num_gpu_blocks_override=64) as llm:
        assert llm.generate(["Once upon a time"])[0].outputs[0].text
    refused = command("quantize", "octavo-tiny", str(out), "--format", "int3", code=1).err
    assert "format is 'int3', expected one of int4, int8" in refused
