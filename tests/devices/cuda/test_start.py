"""Parts of a start are timed one by one: one that fails does not hide the others."""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="the kernels of the device cuda need Triton")

from benchmarks.gpu import start


def test_a_program_that_fails_is_reported_and_the_next_one_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start, "ALONE", {"fails": "raise SystemExit(3)", "ends": ""})
    first, second = (line for _, line in zip(range(2), start.start(), strict=False))
    assert (first["start"], first["failed"]) == ("fails", 3)
    assert second["start"] == "ends"
    assert "failed" not in second
    assert 0 < second["s"] < 60
