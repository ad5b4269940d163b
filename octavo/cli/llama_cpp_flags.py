"""Flags of llama-server: octavo's flag for each, or the reason why there is none.

`llama_cpp_flags.txt` has one line for each: its spellings, the flag of octavo or `-`, and a note.
"""

from __future__ import annotations

from functools import cache
from importlib.resources import files


@cache
def llama_cpp_flags() -> tuple[tuple[str, str, str], ...]:
    """Return spellings, the flag of octavo (empty where there is none) and a note, for each flag."""
    table = (files("octavo") / "cli" / "llama_cpp_flags.txt").read_text(encoding="utf-8")
    rows = [[*map(str.strip, line.split(" | ", 2)), ""] for line in table.splitlines()]
    return tuple((spellings, "" if ours == "-" else ours, note) for spellings, ours, note, *_ in rows)
