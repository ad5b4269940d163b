"""The text of a stream as far as it has come, for readers that are generators.

A reader yields events, and None where it needs more text, so its code need not care where the text is cut.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Iterable
from typing import Final, TypeVar

from octavo.server.formats.events import OutputEvent
from octavo.server.formats.marks import Found, Marks

T = TypeVar("T")
Reading = Generator[OutputEvent | None, None, T]
Emit = Callable[[str], Iterable[OutputEvent]]
"""Returns the events for a piece of text."""

_SPACE: Final = re.compile(r"\s*")
_IN_STRING: Final = re.compile(r'[^"\\]*(?:\\.[^"\\]*)*', re.DOTALL)
_OUTSIDE: Final = re.compile(r'[^"\[\]{}]*')
_SCALAR: Final = re.compile(r"[-+.\w]*")


class Malformed(Exception):
    """The text is not of the format."""


def nothing(_: str) -> Iterable[OutputEvent]:
    """Return no events: the text is left out."""
    return ()


class Source:
    """The text that has come; what lies before `at` has been read."""

    def __init__(self) -> None:
        self.text = ""
        self.at = 0
        self.is_last = False
        self._kept: list[str] | None = None
        self._kept_from = 0

    def push(self, text: str, is_last: bool) -> None:
        """Append a piece; what has been read is forgotten."""
        if self._kept is not None:
            self._kept.append(self.text[self._kept_from : self.at])
            self._kept_from = 0
        self.text = self.text[self.at :] + text
        self.at = 0
        self.is_last = is_last

    def keep_from(self, start: int) -> None:
        """Keep what is read from `start` on until `kept` or `drop_kept` is called."""
        self._kept, self._kept_from = [], start

    def drop_kept(self) -> None:
        self._kept = None

    def kept(self) -> str:
        """Return what was read since `keep_from`, and keep no more."""
        assert self._kept is not None, "nothing is kept"
        text = "".join(self._kept) + self.text[self._kept_from : self.at]
        self._kept = None
        return text

    def push_back(self, text: str) -> None:
        """Put text that has been read before what comes next. Nothing is kept meanwhile."""
        assert self._kept is None, "kept text would have it twice"
        self.text = text + self.text[self.at :]
        self.at = 0

    def take(self, pattern: re.Pattern[str]) -> str:
        """Return the match of the pattern at the current position ("" for none), and go behind it."""
        match = pattern.match(self.text, self.at)
        if match is None:
            return ""
        self.at = match.end()
        return match[0]

    def peek(self) -> Reading[str]:
        """Return the next character that is no white space, and go to it; "" at the end of the text."""
        while True:
            self.take(_SPACE)
            if self.at < len(self.text):
                return self.text[self.at]
            if self.is_last:
                return ""
            yield None

    def until(self, marks: Marks, emit: Emit, is_cut: Callable[[str], bool] = lambda _: False) -> Reading[Found | None]:
        """Emit the text before the next mark, go behind it, and return it; None at the end of the text.

        is_cut: whether what is left at the end of the text is the beginning of a mark, which is not emitted.
        """
        while True:
            start, found = marks.search(self.text, self.at, self.is_last)
            if found is None and self.is_last and is_cut(self.text[self.at :]):
                self.at = len(self.text)
                return None
            if start > self.at:
                yield from emit(self.text[self.at : start])
            self.at = start if found is None else found.end
            if found is not None or self.is_last:
                return found
            yield None

    def word(self, pattern: re.Pattern[str], most_chars: int) -> Reading[str]:
        """Return the longest text here that consists of matches of `pattern`. Raises Malformed when it has more than
        `most_chars`."""
        pieces: list[str] = []
        num_chars = 0
        while True:
            piece = self.take(pattern)
            pieces.append(piece)
            num_chars += len(piece)
            if num_chars > most_chars:
                raise Malformed
            if self.at < len(self.text) or self.is_last:
                return "".join(pieces)
            yield None

    def string(self, emit: Emit, quote: str = '"') -> Reading[None]:
        """Emit the rest of a text in quotes, the closing one included. Raises Malformed at the end of the text."""
        inside = _IN_STRING if quote == '"' else re.compile(_IN_STRING.pattern.replace('"', quote), re.DOTALL)
        while True:
            piece = self.take(inside)
            char = self.text[self.at : self.at + 1]
            # a backslash at the end of the text waits for the character that it escapes
            if char == quote:
                self.at += 1
                yield from emit(piece + quote)
                return
            if self.is_last:
                piece, self.at = piece + char, self.at + len(char)
            if piece:
                yield from emit(piece)
            if self.is_last:
                raise Malformed
            yield None

    def json(self, emit: Emit) -> Reading[None]:
        """Emit one JSON value, which begins here, as it is written. Brackets are counted, not paired. Raises Malformed
        at the end of the text and where there is no value."""
        first = self.text[self.at]
        if first not in '{["':
            word = yield from self.word(_SCALAR, 4096)
            if not word:
                raise Malformed
            yield from emit(word)
            return
        depth = 0
        while True:
            piece = self.take(_OUTSIDE)
            char = self.text[self.at : self.at + 1]
            self.at += len(char)
            if piece or char:
                yield from emit(piece + char)
            if char == '"':
                yield from self.string(emit)
            depth += {"{": 1, "[": 1, "}": -1, "]": -1}.get(char, 0)
            if depth <= 0 and char:
                return
            if not char:
                if self.is_last:
                    raise Malformed
                yield None


class Trimmed:
    """Emits pieces of text without the white space beside marks. only_line: at most one line end on each side.

    is_at_mark: no text has come behind the last mark. has_begun: other characters than white space have come.
    """

    def __init__(self, emit: Emit, *, only_line: bool = False, is_at_mark: bool = False) -> None:
        self._emit = emit
        self._only_line = only_line
        self.is_at_mark = is_at_mark
        self._pending: list[str] = []
        self._gap = ""
        self.has_begun = False

    def __call__(self, piece: str) -> Iterable[OutputEvent]:
        """Return the events of a piece, without the white space that may be beside a mark."""
        if self.is_at_mark and piece:
            piece = piece.removeprefix("\n") if self._only_line else piece.lstrip()
            self.is_at_mark = not self._only_line and not piece
        body = piece.rstrip("\n") if self._only_line else piece.rstrip()
        if body:
            self.has_begun = True
            yield from self._emit(self._gap + "".join(self._pending) + body)
            self._gap, self._pending = "", []
        if len(piece) > len(body):
            self._pending.append(piece[len(body) :])

    def cut(self) -> Iterable[OutputEvent]:
        """Return the events of the text held back before a mark. Text behind the mark is separated from it."""
        left = "".join(self._pending)
        self._pending = []
        self.is_at_mark = True
        if self._only_line:
            return self._emit(left[:-1]) if left[:-1] else ()
        self._gap = self._gap or left or "\n" if self.has_begun else ""
        return ()

    def rest(self) -> Iterable[OutputEvent]:
        left = "".join(self._pending)
        self._pending = []
        return self._emit(left) if left else ()
