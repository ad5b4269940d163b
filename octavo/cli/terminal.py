"""What terminals can show: text in encodings that lack some characters, and lines that break between words."""

from __future__ import annotations

import codecs
import io
import sys

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
}
_HANDLER = "octavo.plain"


def write_any_text() -> None:
    """Let standard output and error take all text: what their encoding lacks becomes similar characters, or "?"."""
    codecs.register_error(_HANDLER, _in_plain_characters)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=_HANDLER)


def _in_plain_characters(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    text = error.object[error.start : error.end]
    return "".join(_PLAIN.get(character, "?") for character in text), error.end
