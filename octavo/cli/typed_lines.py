"""Reads the input of `octavo chat`: single lines, texts of several lines, their history, and Ctrl-C."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from io import TextIOWrapper
from pathlib import Path
from types import FrameType
from typing import Final

from octavo.cli.terminal import say
from octavo.engine.interrupt import Interrupt

_QUOTES: Final = '"""'
_MAX_HISTORY: Final = 1000


class TypedLines(Interrupt):
    """Reads turns from standard input, and holds whether Ctrl-C was pressed.

    Ctrl-C at the prompt raises KeyboardInterrupt, during a response it requests the end of the response; three times
    during one response raise KeyboardInterrupt, too.
    """

    def __init__(self) -> None:
        super().__init__()
        if isinstance(sys.stdin, TextIOWrapper):
            # a line that is no text is refused like another turn, and does not end the conversation
            sys.stdin.reconfigure(errors="surrogateescape")
        self.is_terminal = sys.stdin.isatty()
        self._is_at_prompt = False
        self._num_presses = 0

    def read(self) -> str | None:
        """Return the next turn without surrounding blanks; None at the end of the input. Raises KeyboardInterrupt.

        A turn is a line, lines between two `\"\"\"`, or on a terminal lines of which all but the last end with a
        backslash.
        """
        self.requested, self._num_presses, self._is_at_prompt = False, 0, True
        try:
            return self._read()
        finally:
            self._is_at_prompt = False

    def _read(self) -> str | None:
        line = self._line("> ")
        if line is None:
            return None
        if line.lstrip().startswith(_QUOTES):
            text = line.lstrip().removeprefix(_QUOTES)
            while not text.rstrip().endswith(_QUOTES):
                line = self._line("... ")
                if line is None:
                    return text.strip()
                text += f"\n{line}"
            return text.rstrip().removesuffix(_QUOTES).strip()
        while self.is_terminal and line.endswith("\\"):
            following = self._line("... ")
            line = line[:-1] + ("" if following is None else f"\n{following}")
        return line.strip()

    def _line(self, prompt: str) -> str | None:
        try:
            return input(prompt if self.is_terminal else "")
        except EOFError:
            return None

    def handle(self, signal_number: int, frame: FrameType | None) -> None:
        """Handle a press of Ctrl-C (SIGINT)."""
        self._num_presses += 1
        if self._is_at_prompt or self._num_presses > 2:
            raise KeyboardInterrupt
        self.requested = True


@contextmanager
def line_history(folder: Path | None) -> Iterator[None]:
    """Within the `with`, lines on a terminal can be edited and recalled; the last 1,000 are kept in `folder`. None: no
    history is kept.
    """
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        yield
        return
    try:
        import readline
    except ImportError:  # a Python without readline reads plain lines
        yield
        return
    readline.set_history_length(_MAX_HISTORY)
    file = None if folder is None else folder / "chat_history"
    try:
        if file is not None and file.is_file():
            readline.read_history_file(file)
        yield
    finally:
        if file is not None:
            try:
                file.parent.mkdir(parents=True, exist_ok=True)
                # other users must not be able to read the history
                os.close(os.open(file, os.O_WRONLY | os.O_CREAT, 0o600))
                readline.write_history_file(file)
            except OSError as error:
                say(f"octavo: the history is not kept: {file} cannot be written: {error.strerror}", sys.stderr)
