"""What terminals can show."""

from __future__ import annotations

import io
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.cli import terminal
from octavo.cli.terminal import WordWrap, as_utf_8, exchange_any_text, fitted, histogram, progress, say, sparkline

WIDTH = 20


class Terminal(io.StringIO):
    """A stream that is a terminal of unknown width."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(terminal, "columns", lambda stream: WIDTH)


def wrapped(pieces: list[str]) -> str:
    screen = Terminal()
    wrap = WordWrap(screen)
    for piece in pieces:
        wrap.write(piece)
    wrap.close()
    return screen.getvalue()


def test_what_an_encoding_lacks_becomes_similar_or_a_question_mark(monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.BytesIO()
    stream = io.TextIOWrapper(written, encoding="ascii", write_through=True)
    monkeypatch.setattr("sys.stdout", stream)
    exchange_any_text()
    print("2 × 3 ≤ 7 … ü 狐")
    assert written.getvalue() == b"2 x 3 <= 7 ... ? ?\n"


def test_halves_of_characters_do_not_stop_utf_8(monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(written, encoding="utf-8", write_through=True))
    exchange_any_text()
    print("ü × \udce9")
    assert written.getvalue().decode() == "ü × ?\n"


def test_input_in_ascii_is_read_as_utf_8(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO("für".encode()), encoding="ascii"))
    exchange_any_text()
    assert sys.stdin.read() == "für"
    assert as_utf_8("f\udcc3\udcbcr") == "für"
    assert as_utf_8("f\udcff") == "f\udcff"


@pytest.mark.usefixtures("narrow")
def test_words_of_an_answer_do_not_break_at_the_edge() -> None:
    text = "The quick brown fox jumps over the dog.\n\n  Indented text stays where it is."
    lines = ["The quick brown fox", "jumps over the dog.", "", "  Indented text", "stays where it is."]
    assert wrapped([text]).split("\n") == lines
    assert wrapped(list(text)).split("\n") == lines


@pytest.mark.usefixtures("narrow")
def test_what_has_no_blanks_breaks_where_it_can() -> None:
    # twice as wide as other characters: ten of them fill a line
    assert wrapped(["日本語" * 5]).split("\n") == [("日本語" * 5)[:10], ("日本語" * 5)[10:]]
    # the terminal breaks what is longer than a line
    assert wrapped(["see ", "https://example.org/a/long/address now"]).split("\n") == [
        "see",
        "https://example.org/a/long/address",
        "now",
    ]


@given(st.lists(st.text("ab \n語", max_size=12), max_size=12))
def test_an_answer_is_the_same_however_it_was_cut(pieces: list[str]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(terminal, "columns", lambda stream: 7)
        text = "".join(pieces)
        assert wrapped(pieces) == wrapped([text])
        assert wrapped(pieces).split() == wrapped([text]).split()
        # blanks may become line breaks, nothing else changes
        assert "".join(wrapped(pieces).split()) == "".join(text.split())


@pytest.mark.usefixtures("narrow")
def test_only_a_terminal_is_wrapped() -> None:
    long = "one two three four five six seven"
    pipe, screen = io.StringIO(), Terminal()
    say(long, pipe)
    say(long, screen)
    assert (pipe.getvalue(), screen.getvalue()) == (f"{long}\n", "one two three four\nfive six seven\n")
    wrap = WordWrap(pipe)
    wrap.write(long)
    assert pipe.getvalue().endswith(long)


def test_the_last_column_of_a_table_stays_below_its_head() -> None:
    table = "  name   of a model\n  a row  whose last cell runs on and on"
    assert fitted(table, 24).split("\n") == [
        "  name   of a model",
        "  a row  whose last cell",
        "         runs on and on",
    ]


def test_progress_is_shown_on_a_terminal_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for stream in (io.StringIO(), Terminal()):
        monkeypatch.setattr("sys.stderr", stream)
        with progress("replaying") as on_read:
            on_read(0.5)
            on_read(1.0)
        assert ("replaying" in stream.getvalue()) == stream.isatty()


HOSTILE = "\x1b]0;title\x07\x1b[2Jred\r\n\x9b31m a\u202eb\x08c\td"
HARMLESS = "^[]0;title^G^[[2Jred\n<9b>31m a<202e>b^Hc\td"


def test_a_text_cannot_command_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    screen = Terminal()
    say(HOSTILE, screen, end="")
    assert screen.getvalue() == HARMLESS
    assert wrapped(list(HOSTILE)).split() == HARMLESS.split()
    say(HOSTILE)  # a file gets what there is
    assert capsys.readouterr().out == f"{HOSTILE}\n"


def test_the_largest_value_is_the_highest_and_zero_is_a_blank() -> None:
    assert sparkline([0.0, 1.0, 4.0, 8.0]) == " ▂▅█"
    assert sparkline([]) == ""
    assert sparkline([0.0]) == " "


def test_a_histogram_counts_between_the_least_and_the_largest() -> None:
    assert histogram([1.0, 1.1, 9.0], width=4) == "█  ▅"
    assert histogram([2.0, 2.0], width=3) == "█  "
    assert histogram([]) == ""
