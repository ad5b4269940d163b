"""Keeps the text of callers from becoming control tokens: where a message spells `<|im_end|>`, it is text.

Before a conversation is rendered, each such spelling is replaced by one private character, which templates carry along
whatever they trim, split or repeat. In the rendered text the spelling stands again, with a cut inside: a position that
no token spans. What the template itself writes has no cut.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final, NamedTuple, TypeVar

from octavo.errors import InvalidRequest

_FIRST_MARK: Final = 0x100000
_CUT: Final = "\U0010fffd"
"""The characters of the last private plane stand for spellings, the last of them for a cut alone."""

_MARK: Final = re.compile("[\U00100000-\U0010fffd]")
_ESCAPED_MARK: Final = re.compile(r"\\udb[c-f][0-9a-f]\\ud[c-f][0-9a-f]{2}")
"""A mark as JSON in ASCII writes it."""

T = TypeVar("T")


class CutText(NamedTuple):
    """A text, and the positions in it that no token spans."""

    text: str
    cuts: tuple[int, ...]


class SpecialSpellings:
    """The texts of a tokenizer's special tokens, as callers may spell them. Those of one character are not covered."""

    def __init__(self, spellings: Iterable[str]) -> None:
        # a longer one goes before one that it begins with
        self._spellings = sorted({text for text in spellings if len(text) > 1}, key=lambda text: (-len(text), text))
        self._marks = {text: chr(_FIRST_MARK + place) for place, text in enumerate(self._spellings)}
        self._found = re.compile("|".join(map(re.escape, self._spellings)) or "(?!)")
        self._beginnings = frozenset(text[:size] for text in self._spellings for size in range(1, len(text)))
        self._longest = max(map(len, self._beginnings), default=0)

    def hide(self, value: T, field: str) -> T:
        """`value` (text, or lists and mappings with it) with marks for spellings; `value` itself where there are none.

        Raises InvalidRequest naming `field` for text that has spellings and also the characters of marks.
        """
        if not any(self._found.search(text) or self._begins_at_end(text) for text in _texts(value)):
            return value
        if any(_MARK.search(text) for text in _texts(value)):
            raise InvalidRequest(
                f"{field} has the text of a special token, and also private characters from U+100000 on, which octavo "
                "marks such texts with; leave one of them out",
                field=field,
            )
        hidden: T = self._hidden(value)
        return hidden

    def show(self, text: str) -> CutText:
        """A text that was rendered from what `hide` returned, with the spellings in the places of their marks."""
        text = _ESCAPED_MARK.sub(lambda escaped: str(json.loads(f'"{escaped[0]}"')), text)
        parts: list[str] = []
        cuts: list[int] = []
        size = end = 0
        for mark in _MARK.finditer(text):
            is_cut = mark[0] == _CUT
            parts += [text[end : mark.start()], "" if is_cut else self._spellings[ord(mark[0]) - _FIRST_MARK]]
            size += len(parts[-2])
            cuts.append(size if is_cut else size + 1)
            size += len(parts[-1])
            end = mark.end()
        return CutText("".join([*parts, text[end:]]), tuple(cuts))

    def _hidden(self, value: Any) -> Any:
        if isinstance(value, str):
            return self._hidden_text(value)
        if isinstance(value, Mapping):
            return {self._hidden(key): self._hidden(each) for key, each in value.items()}
        return [self._hidden(each) for each in value] if isinstance(value, list | tuple) else value

    def _hidden_text(self, text: str) -> str:
        text = self._found.sub(lambda found: self._marks[found[0]], text)
        size = self._begins_at_end(text)
        if not size:
            return text
        # what a template writes behind it could complete it to a special token
        place = len(text.rstrip()) - size + 1
        return text[:place] + _CUT + text[place:]

    def _begins_at_end(self, text: str) -> int:
        """Characters of the longest beginning of a special token that a text ends with, white space aside."""
        end = text[-self._longest - 64 :].rstrip() or text.rstrip()
        return next((size for size in range(min(self._longest, len(end)), 0, -1) if end[-size:] in self._beginnings), 0)


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, each in value.items():
            yield from _texts(key)
            yield from _texts(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _texts(each)
