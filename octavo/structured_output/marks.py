"""Marks in the bytes of tokens: where they end, and which tokens would run over their end."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from llguidance import LLTokenizer

Mask = NDArray[np.uint32]
"""Bit i of word t is set where token 32 t + i may follow."""

_MOST_KEPT: Final = 64
"""The number of masks, or lists of tokens, that each cache keeps."""


class Vocabulary:
    """The tokens of a model as bytes. A special token has bytes that no text spells."""

    def __init__(self, tokenizer: LLTokenizer, end_token_ids: Sequence[int]) -> None:
        self.tokenizer = tokenizer
        self.end_token_ids = list(end_token_ids)
        self._crossing = lru_cache(_MOST_KEPT)(self._find_crossing)
        self._inner = lru_cache(_MOST_KEPT)(self._find_inner)
        self._prefixes = lru_cache(_MOST_KEPT)(self._find_prefixes)

    def spelled(self, mark: str) -> bytes:
        """Return the bytes of a mark; names of special tokens in it become the bytes of these."""
        found = mark.encode()
        for token_id in self.token_ids(mark):
            if self.tokenizer.is_special_token(token_id):
                found = found.replace(self.tokenizer.decode_bytes([token_id]), _special(token_id))
        return found

    def token_ids(self, mark: str) -> list[int]:
        """Return tokens that spell a mark."""
        return self.tokenizer.tokenize_str(mark, parse_special=True)

    def bytes_of(self, token_id: int) -> bytes:
        if self.tokenizer.is_special_token(token_id):
            return _special(token_id)
        return self.tokenizer.decode_bytes([token_id])

    def has_special_in(self, text: str) -> bool:
        """Return whether a text spells a special token."""
        return any(name in text for name in self._special_names)

    def only(self, token_ids: Sequence[int]) -> Mask:
        """Return the mask of these tokens alone."""
        return _packed(self._flags(token_ids))

    def without(self, token_ids: Sequence[int]) -> Mask:
        """Return the mask of all tokens but these."""
        flags = ~self._flags(token_ids)
        flags[self.tokenizer.vocab_size :] = False
        return _packed(flags)

    def prefixes(self, text: bytes) -> list[int]:
        """Return the tokens with which the text may begin."""
        return self._prefixes(text)

    def _find_prefixes(self, text: bytes) -> list[int]:
        return [token_id for token_id, each in enumerate(self._all_bytes) if each and text.startswith(each)]

    def crossing(self, marks: tuple[bytes, ...], tail: bytes) -> list[int]:
        """Return the tokens that, behind a text that ends with `tail`, would end one of the marks and go on."""
        return self._crossing(marks, tail)

    def _find_crossing(self, marks: tuple[bytes, ...], tail: bytes) -> list[int]:
        inner = self._inner(frozenset(mark[-1] for mark in marks))
        return [token_id for token_id in inner if _holds((tail + self._all_bytes[token_id])[:-1], marks)]

    def _find_inner(self, last_bytes: frozenset[int]) -> list[int]:
        """Return the tokens that have one of these bytes before their last one."""
        return [token_id for token_id, each in enumerate(self._all_bytes) if not last_bytes.isdisjoint(each[:-1])]

    def _flags(self, token_ids: Sequence[int]) -> NDArray[np.bool_]:
        flags = np.zeros((self.tokenizer.vocab_size // 32 + 1) * 32, dtype=bool)  # as many as a matcher's
        flags[token_ids] = True
        return flags

    @cached_property
    def _special_names(self) -> list[str]:
        special = filter(self.tokenizer.is_special_token, range(self.tokenizer.vocab_size))
        names = ((token_id, self.tokenizer.decode_bytes([token_id]).decode(errors="replace")) for token_id in special)
        return [name for token_id, name in names if name not in ("", f"<[{token_id}]>")]  # a place without a token

    @cached_property
    def _all_bytes(self) -> list[bytes]:
        return [self.bytes_of(token_id) for token_id in range(self.tokenizer.vocab_size)]


def end_of_mark(text: bytes, marks: Sequence[bytes]) -> int | None:
    """Return where the mark ends that ends first; None where there is none."""
    ends = [start + len(mark) for mark in marks if (start := text.find(mark)) >= 0]
    return min(ends, default=None)


def open_tail(text: bytes, marks: Sequence[bytes]) -> bytes:
    """Return the longest end of a text with which a mark begins."""
    longest = min(len(text), max(map(len, marks)) - 1)
    for length in range(longest, 0, -1):
        if any(mark.startswith(text[-length:]) for mark in marks):
            return text[-length:]
    return b""


def _holds(text: bytes, marks: Sequence[bytes]) -> bool:
    return any(mark in text for mark in marks)


def _special(token_id: int) -> bytes:
    return b"\xff[%d]" % token_id  # no text in UTF-8 has the byte 255


def _packed(flags: NDArray[np.bool_]) -> Mask:
    return np.packbits(flags, bitorder="little").view(np.uint32)
