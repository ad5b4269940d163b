"""How octavo logs: the standard library's loggers under "octavo", one line per event, to stderr. Nothing at import.

A module takes `logging.getLogger(__name__)`; a program (the command line, the server, the core process) calls `set_up`
once. Used as a library, octavo leaves logging to the program around it.
"""

from __future__ import annotations

import logging
import re
import sys
from typing import TextIO

_NAME = "octavo"
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_ESCAPED = re.compile(r"[^\x20-\x7e█▓▒░]+")  # those four draw the bar of the memory plan


def escaped(text: str) -> str:
    """Return `text` on one line of printable ASCII: control and other characters become escapes such as `\\n`, `\\x1b`.

    What a client has sent goes through this before it is logged on a line of its own.
    """
    ascii_text = text.encode("ascii", "backslashreplace").decode()
    return _CONTROL.sub(lambda match: repr(match[0])[1:-1], ascii_text)


class _LineFormatter(logging.Formatter):
    """`12:34:56.789 core INFO message`; the process's role distinguishes the lines of a server.

    A record cannot imitate another one, nor steer a terminal, whatever a client put into it: further lines are
    indented, and everything but printable ASCII and the bar of the memory plan is escaped.
    """

    def __init__(self, role: str) -> None:
        super().__init__(f"%(asctime)s.%(msecs)03d {role} %(levelname)s %(message)s", datefmt="%H:%M:%S")

    def format(self, record: logging.LogRecord) -> str:
        return "\n    ".join(
            _ESCAPED.sub(lambda match: escaped(match[0]), line) for line in super().format(record).split("\n")
        )


class _StderrHandler(logging.StreamHandler[TextIO]):
    """Our own handler, so that a second `set_up` replaces it and leaves other people's alone."""


def set_up(level: str = "info", *, role: str = "octavo", stream: TextIO | None = None) -> None:
    """Send octavo's messages from `level` on to `stream` (stderr). A second call replaces the first."""
    logger = logging.getLogger(_NAME)
    for handler in [handler for handler in logger.handlers if isinstance(handler, _StderrHandler)]:
        logger.removeHandler(handler)
    handler = _StderrHandler(stream or sys.stderr)
    handler.setFormatter(_LineFormatter(role))
    logger.addHandler(handler)
    logger.setLevel(level.upper())
    logger.propagate = False
