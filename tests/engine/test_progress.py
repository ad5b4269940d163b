"""Progress bar: on a terminal or when asked for, never more often than the eye can follow."""

from __future__ import annotations

import io

import pytest

from octavo.engine.progress import ProgressBar


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def shown(stream: io.StringIO, **options: bool) -> list[str]:
    readings = iter([0.0, 0.05, 1.0, 2.0, 4.0])
    with ProgressBar(4, stream=stream, clock=lambda: next(readings), **options) as progress:
        progress.update(0, 8, 1)
        progress.update(1, 10, 20)
        progress.update(4, 10, 80)
    return stream.getvalue().split("\r")[1:]


def test_line_tells_prompts_times_and_tokens_per_second() -> None:
    first, second, last = shown(Terminal())
    assert " 1/4 prompts [00:01<00:03, in 10 tokens/s, out 20 tokens/s]" in first
    assert " 4/4 prompts [00:02<00:00, in 5 tokens/s, out 40 tokens/s]" in second
    assert last.rstrip().endswith("[00:04<00:00, in 2 tokens/s, out 20 tokens/s]")
    assert last.endswith("\n")


def test_a_shorter_line_leaves_nothing_of_a_longer_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    readings = iter([0.0, 1.0, 2.0, 3.0])
    stream = Terminal()
    with ProgressBar(4, stream=stream, clock=lambda: next(readings)) as progress:
        progress.update(1, 1000, 1000)
        progress.update(2, 1, 1)
    long, short, last = stream.getvalue().split("\r")[1:]
    assert len(short.rstrip()) < len(long) == len(short)
    assert last.rstrip("\n") == last.rstrip()


def test_nothing_is_written_to_a_file_unless_asked_for() -> None:
    assert shown(io.StringIO()) == []
    assert len(shown(io.StringIO(), shown=True)) == 3
    assert shown(Terminal(), shown=False) == []


def test_empty_batch_is_a_full_bar() -> None:
    stream = Terminal()
    with ProgressBar(0, stream=stream):
        pass
    assert " 0/0 prompts" in stream.getvalue()


@pytest.mark.parametrize("columns", [20, 60, 80, 120])
def test_a_line_fits_the_terminal(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    for line in shown(Terminal()):
        assert len(line.rstrip()) < columns


def test_a_terminal_without_blocks_gets_another_mark(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    written = io.BytesIO()
    stream = io.TextIOWrapper(written, encoding="ascii", write_through=True)
    with ProgressBar(1, shown=True, stream=stream) as progress:
        progress.update(1, 1, 1)
    assert b"|####" in written.getvalue()
