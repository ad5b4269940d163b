"""Verdicts on classes of transformers: which are kept, and which are believed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from octavo.errors import UnsupportedModel
from octavo.models.fallback import proof
from octavo.models.fallback.library import Library
from octavo.models.fallback.proof import Verdict, proved


class OfTransformers:
    """In place of a class of transformers."""


@pytest.fixture
def prove(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function that proves into a folder what a comparison with this verdict finds, and how often one was made."""
    made: list[Verdict] = []

    def run(folder: Path, verdict: Verdict) -> tuple[str, int]:
        monkeypatch.setattr(proof, "_digest", lambda *_: "digest")
        monkeypatch.setattr(proof, "_find", lambda *_: made.append(verdict) or verdict)
        no: Any = None
        return proved(Library(OfTransformers, None), "config.json", no, no, folder), len(made)

    return run


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"{}",
        b"[1]",
        b'{"error": null}',
        b'{"error": 0.5}',
        b'{"error": -1}',
        b'{"error": "0"}',
        b'{"refused": "\xff"}',
    ],
)
def test_a_kept_verdict_that_no_comparison_finds_is_not_believed(content: bytes, prove: Any, tmp_path: Path) -> None:
    (tmp_path / "digest.json").write_bytes(content)
    for _ in range(2):
        assert prove(tmp_path, Verdict(1e-6)) == ("proved: at most 1.0e-06 from eager attention in float32", 1)


def test_what_refuses_without_a_comparison_is_tried_again(prove: Any, tmp_path: Path) -> None:
    for _ in range(2):
        with pytest.raises(UnsupportedModel, match="OfTransformers .* is refused: .* No space left"):
            prove(tmp_path, Verdict(refused="its small copy does not run (OSError: No space left on device)"))
    assert prove(tmp_path, Verdict(1e-6))[1] == 3


def test_a_folder_that_cannot_be_made_keeps_no_model_from_starting(
    prove: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    for count in (1, 2):
        assert prove(tmp_path / "file" / "proofs", Verdict(1e-6))[1] == count
    assert "is not kept, and the next start proves it again: " in caplog.text
