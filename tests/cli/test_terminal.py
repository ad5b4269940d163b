"""What terminals can show."""

from __future__ import annotations

import io

import pytest

from octavo.cli.terminal import write_any_text


def test_what_an_encoding_lacks_becomes_similar_or_a_question_mark(monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.BytesIO()
    stream = io.TextIOWrapper(written, encoding="ascii", write_through=True)
    monkeypatch.setattr("sys.stdout", stream)
    write_any_text()
    print("2 × 3 ≤ 7 … ü 狐")
    assert written.getvalue() == b"2 x 3 <= 7 ... ? ?\n"


def test_halves_of_characters_do_not_stop_utf_8(monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(written, encoding="utf-8", write_through=True))
    write_any_text()
    print("ü × \udce9")
    assert written.getvalue().decode() == "ü × ?\n"
