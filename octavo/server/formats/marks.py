"""Marks in a text: literals, or patterns with gaps, which are found in a stream and written into grammars.

A pattern is the part of regular expressions that response templates use: literal text, white space (`\\s*`, `\\n?`),
anything (`.*?`), and named groups of one class of characters (`(?P<name>[^>]+)`). Gaps are bounded, and so is the text
that is held back.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

MOST_NAME: Final = 128
"""Most characters of a group of a mark; a longer text is no name."""

_MOST_GAP: Final = 64
_PIECE: Final = re.compile(
    r"""\(\?P<(?P<group>\w+)>(?P<chars>\\[wS]|\.|\[(?:\\.|[^\]\\])+\])(?P<times>[+*]\??)\)
      | (?P<space>(?:\\s[*+]?\??|\\n[*?]|[ ][*?])+)
      | (?P<anything>\.[*+]\??)
      | (?P<literal>(?:\\[^\w\s]|\\[nt]|[^\\.^$*+?{}\[\]|()])(?![*+?{]))""",
    re.VERBOSE,
)
_ESCAPES: Final = {"\\n": "\n", "\\t": "\t"}


@dataclass(frozen=True)
class Piece:
    """A part of a mark. literal: its text, for a gap empty. gap: the pattern of a gap. group: the name of a gap."""

    literal: str = ""
    gap: str = ""
    group: str = ""
    is_space: bool = False

    @property
    def full(self) -> str:
        return re.escape(self.literal) if self.literal else f"(?:{self.gap})"

    @property
    def begun(self) -> str:
        """The pattern of any prefix of the piece, including the empty one and the whole piece."""
        if not self.literal:
            return f"(?:{self.gap.removesuffix('?')})" if self.gap.endswith("?") else f"(?:{self.gap})?"
        pattern = ""
        for char in reversed(self.literal):
            pattern = f"(?:{re.escape(char)}{pattern})?"
        return pattern


@dataclass(frozen=True)
class Mark:
    """The pieces of a mark; the first one is literal, the last one is literal or a group.

    is_spaced: all white space beside it belongs to it; else at most one line end does.
    """

    pieces: tuple[Piece, ...]
    is_spaced: bool = True

    @classmethod
    def of(cls, literal: str) -> Mark:
        """Return the mark of a literal text. Raises ValueError for an empty one."""
        if not literal:
            raise ValueError("a mark is empty")
        return cls((Piece(literal),))

    @classmethod
    def of_pieces(cls, pieces: Sequence[Piece]) -> Mark:
        """Return the mark without the white space at its ends. Raises ValueError when a gap is at an end."""
        beside = [piece for piece in (*pieces[:1], *pieces[-1:]) if piece.is_space]
        inner = [*pieces]
        while inner and inner[0].is_space:
            inner.pop(0)
        while inner and inner[-1].is_space:
            inner.pop()
        if not inner or not inner[0].literal or not (inner[-1].literal or inner[-1].group):
            raise ValueError("a mark must begin with text, and end with text or a group")
        return cls(tuple(inner), is_spaced=not beside or any("\\s" in piece.gap for piece in beside))

    def behind(self, literal: str) -> Mark:
        """Return the mark of a literal text, white space and this mark."""
        space = Piece(gap=rf"\s{{0,{_MOST_GAP}}}", is_space=True)
        return Mark((Piece(literal), space, *self.pieces), self.is_spaced)

    @cached_property
    def full(self) -> str:
        """The pattern of the whole mark, without names of groups. A group at its end needs a character behind it."""
        last = self.pieces[-1]
        behind = f"(?=(?!{last.gap.split('{')[0]})[\\s\\S])" if last.group else ""
        return "".join(piece.full for piece in self.pieces) + behind

    @cached_property
    def begun(self) -> str:
        """The pattern of any prefix of the mark that is not empty."""
        first, *others = self.pieces
        pattern = ""
        for piece in reversed(others):
            pattern = f"(?:{piece.begun}|{piece.full}{pattern})" if pattern else piece.begun
        start = re.escape(first.literal[0]) + Piece(first.literal[1:]).begun if first.literal[1:] else first.full
        return f"(?:{first.full}{pattern}|{start})" if pattern else start

    @cached_property
    def _groups(self) -> re.Pattern[str]:
        named = (f"(?P<{piece.group}>{piece.gap})" if piece.group else piece.full for piece in self.pieces)
        return re.compile("".join(named), re.DOTALL)

    def groups(self, text: str) -> Mapping[str, str]:
        found = self._groups.fullmatch(text)
        return {} if found is None else found.groupdict()

    def spelled(self, **groups: str) -> str:
        """Return the shortest text of the mark with these texts of its groups."""
        return "".join(piece.literal or groups.get(piece.group, "") for piece in self.pieces)


def pieces_of(pattern: str) -> list[Piece]:
    """Return the pieces of a pattern. Raises ValueError for syntax that patterns of marks do not have."""
    pieces: list[Piece] = []
    at = 0
    while at < len(pattern):
        found = _PIECE.match(pattern, at)
        if found is None:
            raise ValueError(f"the pattern {pattern!r:.200} has {pattern[at : at + 10]!r}, which is not supported here")
        at = found.end()
        if found["group"]:
            lazy = "?" if found["times"].endswith("?") or found["chars"] == "." else ""
            chars = r"[\w.\-]" if found["chars"] == r"\w" else found["chars"]  # names of tools have these, too
            pieces.append(Piece(gap=f"{chars}{{1,{MOST_NAME}}}{lazy}", group=found["group"]))
        elif found["space"]:
            gap = rf"\s{{0,{_MOST_GAP}}}" if r"\s" in found["space"] else "\n?"
            pieces.append(Piece(gap=gap, is_space=True))
        elif found["anything"]:
            pieces.append(Piece(gap=f".{{0,{_MOST_GAP}}}?"))
        else:
            literal = _ESCAPES.get(found["literal"], found["literal"].removeprefix("\\"))
            if pieces and pieces[-1].literal:
                literal = pieces.pop().literal + literal
            pieces.append(Piece(literal))
    return pieces


@dataclass(frozen=True)
class Found:
    """A mark in a text."""

    mark: Mark
    start: int
    end: int
    groups: Mapping[str, str]


class Marks:
    """Several marks that are looked for together. Where two begin at one place, the longest spelling goes first, and a
    pattern before the literal text with which it begins."""

    def __init__(self, marks: Iterable[Mark]) -> None:
        self.marks = sorted(dict.fromkeys(marks), key=lambda mark: (-len(mark.spelled()), -len(mark.pieces)))
        whole = "|".join(f"({mark.full})" for mark in self.marks) or "(?!)"
        # a mark that may still be completed wins over later ones, so that the result does not depend on the cuts
        either = "|".join(rf"({mark.full})|(?:{mark.begun})\Z" for mark in self.marks) or "(?!)"
        self._whole = re.compile(whole, re.DOTALL)
        self._any = re.compile(either, re.DOTALL)

    def is_begun(self, text: str) -> bool:
        """Return whether a text that is no mark is the beginning of one."""
        found = self._any.match(text)
        return found is not None and found.lastindex is None

    def search(self, text: str, at: int, is_last: bool) -> tuple[int, Found | None]:
        """Return where the first mark from `at` on begins, or may begin, and the mark where it is whole.

        is_last: no text follows.
        """
        match = (self._whole if is_last else self._any).search(text, at)
        if match is None:
            return len(text), None
        if match.lastindex is None:
            return match.start(), None
        mark = self.marks[match.lastindex - 1]
        return match.start(), Found(mark, match.start(), match.end(), mark.groups(match[0]))
