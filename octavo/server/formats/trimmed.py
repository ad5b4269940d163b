"""White space beside marks is left out of a text that comes in pieces."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from octavo.server.formats.events import OutputEvent


class Trimmed:
    """Emits pieces of text but for the white space beside marks. only_line: at most one line end on each side.

    is_at_mark: the text begins behind a mark. has_begun: anything but white space has come.
    """

    def __init__(
        self, emit: Callable[[str], Iterable[OutputEvent]], *, only_line: bool = False, is_at_mark: bool = False
    ) -> None:
        self._emit = emit
        self._only_line = only_line
        self._is_at_mark = is_at_mark
        self._pending: list[str] = []
        self._gap = ""
        self.has_begun = False

    def __call__(self, piece: str) -> Iterable[OutputEvent]:
        """Return the events of a piece, without the white space that may be beside a mark."""
        if self._is_at_mark and piece:
            piece = piece.removeprefix("\n") if self._only_line else piece.lstrip()
            self._is_at_mark = not self._only_line and not piece
        body = piece.rstrip("\n") if self._only_line else piece.rstrip()
        if body:
            self.has_begun = True
            yield from self._emit(self._gap + "".join(self._pending) + body)
            self._gap, self._pending = "", []
        if len(piece) > len(body):
            self._pending.append(piece[len(body) :])

    def cut(self) -> Iterable[OutputEvent]:
        """Return the events of what is left before a mark. Text behind it is parted from what has come before."""
        left = "".join(self._pending)
        self._pending = []
        self._is_at_mark = True
        if self._only_line:
            return self._emit(left[:-1]) if left[:-1] else ()
        self._gap = self._gap or left or "\n" if self.has_begun else ""
        return ()

    def rest(self) -> Iterable[OutputEvent]:
        """Return the events of what is left at the end of the text."""
        left = "".join(self._pending)
        self._pending = []
        return self._emit(left) if left else ()
