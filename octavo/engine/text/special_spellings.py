"""Keeps the text of callers from becoming control tokens: where a message spells `<|im_end|>`, it is text.

Before a conversation is rendered, each such spelling gets a cut behind its first character: a private character, which
templates carry along whatever they trim, split or repeat. In the rendered text the cuts are taken out again, and their
positions are what no token may span. What the template itself writes has no cut.

Only the spellings of special tokens are cut. An added token that is not special, such as `<think>`, stays a token in
what a message says, as in transformers and vLLM: templates split the messages of earlier turns at its text.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final, NamedTuple, TypeVar

from octavo.errors import InvalidRequest

_CUT: Final = "\U0010fffd"
_ESCAPED_CUT: Final = r"\udbff\udffd"
"""A cut as JSON in ASCII writes it."""

T = TypeVar("T")


class CutText(NamedTuple):
    """A text, and the positions in it that no token spans."""

    text: str
    cuts: tuple[int, ...]


class SpecialSpellings:
    """The texts of a tokenizer's special tokens, as callers may spell them. Those of one character are not covered."""

    def __init__(self, spellings: Iterable[str]) -> None:
        texts = {text for text in spellings if len(text) > 1}
        rests = {first: [re.escape(text[1:]) for text in texts if text[0] == first] for first in {t[0] for t in texts}}
        # the first character of each spelling, also of those that overlap
        patterns = [f"{re.escape(first)}(?={'|'.join(rest)})" for first, rest in rests.items()]
        self._first = re.compile("|".join(patterns) or "(?!)")
        self._beginnings = frozenset(text[:size] for text in texts for size in range(1, len(text)))
        self._longest = max(map(len, self._beginnings), default=0)

    def hide(self, value: T, field: str) -> T:
        """Return `value` (text, or lists and mappings with it) with cuts; `value` itself where there are no spellings.

        Raises InvalidRequest, which names `field`, for text that has spellings and also the character of cuts.
        """
        if not any(self._first.search(text) or self._sizes_of_end(text) for text in _texts(value)):
            return value
        if any(_CUT in text for text in _texts(value)):
            raise InvalidRequest(
                f"{field} has the text of a special token, and also the private character U+10FFFD, which octavo marks "
                "such texts with; leave one of them out",
                field=field,
            )
        hidden: T = self._cut(value)
        return hidden

    def show(self, text: str) -> CutText:
        """Return a text that was rendered from what `hide` returned without its cuts, and their positions."""
        pieces = text.replace(_ESCAPED_CUT, _CUT).split(_CUT)
        cuts: list[int] = []
        for piece in pieces[:-1]:
            cuts.append(len(piece) + (cuts[-1] if cuts else 0))
        return CutText("".join(pieces), tuple(cuts))

    def _cut(self, value: Any) -> Any:
        if isinstance(value, str):
            return self._cut_text(value)
        if isinstance(value, Mapping):
            return {self._cut(key): self._cut(each) for key, each in value.items()}
        return [self._cut(each) for each in value] if isinstance(value, list | tuple) else value

    def _cut_text(self, text: str) -> str:
        sizes = self._sizes_of_end(text)
        text = self._first.sub(lambda found: found[0] + _CUT, text)
        end = len(text.rstrip())
        for size in sizes:
            # what a template writes behind it could complete it to a special token
            place = end - size + 1
            text = text[:place] + _CUT + text[place:]
        return text

    def _sizes_of_end(self, text: str) -> list[int]:
        """Return the lengths of the beginnings of special tokens that a text ends with, without white space."""
        end = text[-self._longest - 64 :].rstrip() or text.rstrip()
        return [size for size in range(1, min(self._longest, len(end)) + 1) if end[-size:] in self._beginnings]


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
