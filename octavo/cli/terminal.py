"""Output on terminals: replaces characters that an encoding lacks, wraps lines between words, shows progress and small
charts.

Output to a file or a pipe is never wrapped.
"""

from __future__ import annotations

import codecs
import io
import os
import re
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final, TextIO

_PLAIN = {
    "×": "x",
    "–": "-",
    "—": "-",
    "−": "-",
    "…": "...",
    "·": ".",
    "→": "->",
    "≤": "<=",
    "≥": ">=",
    "µ": "u",
    "“": '"',
    "”": '"',
    "‘": "'",
    "’": "'",
    **dict(zip("█▓▒░▁▂▃▄▅▆▇", "#=+._.:-=+*", strict=True)),
}
_HANDLER = "octavo.plain"


def exchange_any_text() -> None:
    """Make standard output and error accept all text, and standard input read UTF-8 where the locale has only ASCII.

    Characters that an encoding lacks become similar ones, or "?".
    """
    codecs.register_error(_HANDLER, _in_plain_characters)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=_HANDLER)
    if isinstance(sys.stdin, io.TextIOWrapper) and codecs.lookup(sys.stdin.encoding).name == "ascii":
        sys.stdin.reconfigure(encoding="utf-8", errors="strict")


def as_utf_8(word: str) -> str:
    """Return a word of the command line with its bytes read as UTF-8, in every locale."""
    try:
        return os.fsencode(word).decode()
    except UnicodeError:
        return word


def _in_plain_characters(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    text = error.object[error.start : error.end]
    return "".join(_PLAIN.get(character, "?") for character in text), error.end


_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")


def printable(text: str) -> str:
    """Return a text without characters that move the cursor, change the terminal or turn the order of others around.

    Escape becomes ^[, others their number; carriage returns are left out.
    """
    return _CONTROLS.sub(_shown_control, text)


def _shown_control(match: re.Match[str]) -> str:
    number = ord(match[0])
    return "" if match[0] == "\r" else f"^{chr(number ^ 64)}" if number < 128 else f"<{number:x}>"


def say(text: str, stream: TextIO | None = None, end: str = "\n") -> None:
    """Print lines to a stream (by default standard output); on a terminal long lines are wrapped between words."""
    stream = sys.stdout if stream is None else stream
    print(fitted(printable(text), columns(stream)) if stream.isatty() else text, end=end, file=stream)


def columns(stream: TextIO) -> int:
    """Return the width of the terminal behind a stream, in characters; 80 where it is unknown."""
    try:
        return os.get_terminal_size(stream.fileno()).columns or 80
    except (OSError, ValueError):
        return 80


def fitted(text: str, width: int) -> str:
    """Return the lines of a text, longer ones broken between words; the last column of a table stays below its head."""
    return "\n".join(line if len(line) <= width else _broken(line, width) for line in text.split("\n"))


def _broken(line: str, width: int) -> str:
    starts = [match.end() for match in re.finditer(r"(?<=\S)  +|^ +", line) if match.end() <= width * 2 // 3]
    start = starts[-1] if starts else 0
    return textwrap.fill(
        line[start:],
        width,
        initial_indent=line[:start],
        subsequent_indent=" " * start,
        break_long_words=False,
        break_on_hyphens=False,
    )


_WIDE = "\u1100-\u115f\u2e80-\ua4cf\uac00-\ud7a3\uf900-\ufaff\ufe30-\ufe6f\uff00-\uff60\uffe0-\uffe6"
_TOKEN = re.compile(rf"\n|[^\S\n]+|[{_WIDE}]|[^\s{_WIDE}]+")


class WordWrap:
    """Writes text piece by piece; on a terminal a word that does not fit begins a new line, and text is made printable.

    The last word is held back until it is known to be whole: end with `close`.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._is_terminal = stream.isatty()
        self._column = 0
        self._held = ""
        self._gap = ""

    def write(self, text: str) -> None:
        if not self._is_terminal:
            self._stream.write(text)
        else:
            tokens = _TOKEN.findall(self._held + printable(text))
            is_whole = not tokens or tokens[-1].isspace() or re.fullmatch(f"[{_WIDE}]", tokens[-1]) is not None
            self._held = "" if is_whole else tokens.pop()
            for token in tokens:
                self._write_token(token)
        self._stream.flush()

    def close(self) -> None:
        """Write the text that is held back."""
        if self._held:
            self._write_token(self._held)
        self._stream.write(self._gap)
        self._held = self._gap = ""
        self._stream.flush()

    def _write_token(self, token: str) -> None:
        from rich.cells import cell_len

        if token == "\n":
            self._stream.write("\n")
            self._column, self._gap = 0, ""
            return
        if token.isspace():
            self._gap += token
            return
        width, gap = cell_len(token), self._gap
        if self._column and self._column + len(gap) + width > columns(self._stream):
            gap, self._column = "\n", -1
        self._stream.write(gap + token)
        self._column += len(gap) + width
        self._gap = ""


@contextmanager
def progress(label: str) -> Iterator[Callable[[float], None]]:
    """Show progress on standard error where that is a terminal; the function receives shares from 0 to 1."""
    if not sys.stderr.isatty():
        yield lambda share: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns_shown = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:.0f} %"))
    with Progress(*columns_shown, TimeRemainingColumn(), console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(label, total=100)
        shown = 0

        def update(share: float) -> None:
            nonlocal shown
            percent = int(100 * share)
            if percent > shown:
                shown = percent
                bar.update(task, completed=percent)

        yield update


_LEVELS: Final = "▁▂▃▄▅▆▇█"


def sparkline(values: Sequence[float]) -> str:
    """Return a character for each value, higher for larger ones; the largest has the highest, 0 a blank."""
    most = max(values, default=0.0) or 1.0
    return "".join(_LEVELS[min(7, int(8 * value / most))] if value > 0 else " " for value in values)


def histogram(values: Sequence[float], width: int = 16) -> str:
    """Return the number of values in each of `width` equal intervals between the least and the largest value."""
    if not values:
        return ""
    low, high = min(values), max(values)
    counts = [0] * width
    for value in values:
        counts[min(width - 1, int((value - low) / ((high - low) or 1.0) * width))] += 1
    return sparkline(counts)
