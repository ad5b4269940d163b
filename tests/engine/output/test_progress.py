"""Progress bar: on a terminal, or where it is shown in any case."""

from __future__ import annotations

import io

import pytest

from octavo.engine.output.progress import ProgressBar


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def written(stream: io.StringIO, num_prompts: int = 4, **options: bool) -> str:
    with ProgressBar(num_prompts, stream=stream, **options) as progress:
        for number in range(num_prompts):
            progress.update(number + 1, 8, 9)
    return stream.getvalue()


def test_the_last_line_has_the_totals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    assert "4/4 prompts" in written(Terminal())
    assert "tokens/s in" in written(Terminal())


def test_nothing_is_written_to_a_file_unless_it_is_shown_in_any_case() -> None:
    assert written(io.StringIO()) == ""
    assert "4/4 prompts" in written(io.StringIO(), shown=True)
    assert written(Terminal(), shown=False) == ""


def test_an_empty_batch_has_a_bar_too() -> None:
    assert "0/0 prompts" in written(Terminal(), num_prompts=0)


def test_a_terminal_without_blocks_gets_another_mark(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    raw = io.BytesIO()
    with ProgressBar(1, shown=True, stream=io.TextIOWrapper(raw, encoding="ascii", write_through=True)) as progress:
        progress.update(1, 1, 1)
    assert b"1/1 prompts ---" in raw.getvalue()
