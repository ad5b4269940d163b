"""`octavo models`."""

from __future__ import annotations

import pytest

from octavo.cli.families import families
from octavo.config.images import READ_IMAGES
from octavo.models.registry import known_architectures


def test_every_architecture_of_a_family_is_listed_with_what_is_supported(capsys: pytest.CaptureFixture[str]) -> None:
    assert families() == 0
    lines = capsys.readouterr().out.splitlines()
    listed = {name.strip() for line in lines[1:] for name in line.split("  ")[-1].split(",")}
    missing = set(known_architectures()) - listed
    assert not missing, (
        "enter the family into tests/fakes/checkpoints.py; then: python -m tools.reference docs/reference"
    )
    qwen3 = next(line for line in lines if line.startswith("qwen3 "))
    assert all(words in qwen3 for words in ("full, window", "int8", "tensor, pipeline"))


def test_what_prompts_may_bring_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    families()
    table = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()[1:]}
    assert "text, images, video" in table["qwen3_vl"]
    assert "text, images " in table["gemma3"]
    assert "sound" in table["whisper"]
    assert {name.strip(",") for line in table.values() for name in line.split()} >= READ_IMAGES
