"""Token ids to text as they arrive, and the stop strings that are looked for in it.

The text of an output is what follows the prompt's text: where a token writes a space before its word, the space is kept
behind a prompt. It is made token by token however many come in one step, so a streamed text equals the whole one.
"""

from __future__ import annotations

import copy
from bisect import bisect_right
from collections.abc import Sequence
from typing import Final

from octavo.core.sampling_params import SamplingParams
from octavo.engine.text.tokenizer import Tokenizer

REPLACEMENT: Final = "\ufffd"
"""What bytes that are no character (yet) are decoded to."""

CONTEXT_TOKENS: Final = 6
"""Prompt tokens that the first output token is decoded behind."""


class Detokenizer:
    """The text of one sequence, a piece for each token.

    A piece is decoded behind the tokens of the piece before it, because decoders look at neighbours. While the text
    ends with an incomplete character nothing is given out: the next token may complete it.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_token_ids: Sequence[int] = (),
        *,
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
    ) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        # only special tokens that are shown can have spaces between them
        self._joins_special = not (skip_special_tokens or spaces_between_special_tokens)
        # the texts of tokens that hold whole characters need only be joined
        self._is_joined = tokenizer.joins_bytes and not self._joins_special
        self._last_was_special = False
        self._before = _context(tokenizer, prompt_token_ids, skip_special_tokens)
        self._before_text = self._decode(self._before)
        self._pending: list[int] = []

    def push(self, token_id: int) -> str:
        """Return the text that this token completes; "" when there is none yet."""
        plain = self.plain_piece(token_id)
        if plain is not None:
            self._before, self._before_text = [token_id], plain
            return plain
        if not _has_text(self._tokenizer, token_id, self._skip):
            return ""
        if self._joins_special and (special := self._joined_special(token_id)) is not None:
            return special
        self._pending.append(token_id)
        piece = self._pending_text()
        if piece.endswith(REPLACEMENT):
            return ""
        self._advance()
        return piece

    def plain_piece(self, token_id: int) -> str | None:
        """Return what `push` would, where that does not depend on the tokens before; None where it does."""
        if not self._is_joined or self._pending:
            return None
        piece = self._tokenizer.first_text(token_id, self._skip)
        return piece if piece and REPLACEMENT not in piece else None

    def fork(self) -> Detokenizer:
        """Return an independent copy."""
        other = copy.copy(self)
        other._pending = self._pending.copy()
        return other

    def flush(self) -> str:
        """Return what is still held back at the end of the sequence: an incomplete character shows as U+FFFD."""
        piece = self._pending_text() if self._pending else ""
        self._advance()
        return piece

    def num_held_chars(self) -> int:
        """Return the number of whole characters that are held back with an incomplete one behind them."""
        return len(self._pending_text().rstrip(REPLACEMENT)) if self._pending else 0

    def _joined_special(self, token_id: int) -> str | None:
        """Return the text of a special token right behind another one, without the space that the decoder writes."""
        follows, self._last_was_special = self._last_was_special, token_id in self._tokenizer.special_ids
        if not (follows and self._last_was_special):
            return None
        piece = self.flush() + self._tokenizer.added_tokens[token_id]
        self._pending = [token_id]
        self._advance()
        return piece

    def _pending_text(self) -> str:
        text = self._decode(self._before + self._pending)
        if text.startswith(self._before_text):
            return text[len(self._before_text) :]
        # the pending bytes spoil characters that were complete: some decoders judge a run of bytes as a whole
        return self._decode(self._pending)

    def _advance(self) -> None:
        if self._pending:
            self._before = self._pending
            self._before_text = self._decode(self._before)
            self._pending = []

    def _decode(self, token_ids: list[int]) -> str:
        if len(token_ids) == 1:
            return self._tokenizer.first_text(token_ids[0], self._skip)
        return self._tokenizer.decode(token_ids, self._skip) if token_ids else ""


class StopStrings:
    """Finds stop strings in a text that grows."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._by_last_char: dict[str, list[str]] = {}
        for stop in stops:
            self._by_last_char.setdefault(stop[-1], []).append(stop)
        self._longest = max(map(len, stops), default=0)
        self._first_chars = frozenset(stop[0] for stop in stops)
        self._sorted = sorted(stops)

    def find(self, text: str, num_old_chars: int) -> tuple[int, str] | None:
        """Return start and text of the earliest match that ends behind the first `num_old_chars` characters."""
        matches: list[tuple[int, int, str]] = []
        # the last character of a match is new, so most stop strings need not be searched for
        last_chars = self._by_last_char.keys() & set(text[num_old_chars:])
        for stop in (stop for char in last_chars for stop in self._by_last_char[char]):
            start = text.find(stop, max(0, num_old_chars - len(stop) + 1))
            if start >= 0:
                matches.append((start, len(stop), stop))
        if not matches:
            return None
        start, _, stop = min(matches)
        return start, stop

    def completes(self, text: str, piece: str) -> bool:
        """Return whether `piece`, behind `text`, completes a match."""
        tail = text[max(0, len(text) - self._longest + 1) :]
        return self.find(tail + piece, len(tail)) is not None

    def num_held_chars(self, text: str) -> int:
        """Return the length of the longest end of `text` that may be the start of a stop string."""
        tail = text[len(text) - self._longest + 1 :] if len(text) >= self._longest else text
        for start, char in enumerate(tail):
            if char in self._first_chars and self._begins_with(tail[start:]):
                return len(tail) - start
        return 0

    def _begins_with(self, text: str) -> bool:
        """Return whether a stop string begins with `text` and is longer. Those are neighbours in the sorted list."""
        place = bisect_right(self._sorted, text)
        return place < len(self._sorted) and self._sorted[place].startswith(text)


class SequenceText:
    """The text of one sequence of a request under its sampling parameters: detokenised, and ended by stop strings.

    A stop string counts when its last character comes with token number `min_tokens` or later.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int], params: SamplingParams) -> None:
        self.text = ""
        self.stop_string: str | None = None
        self._include_stop = params.include_stop_str_in_output
        self._min_tokens = params.min_tokens
        self._num_tokens = 0
        self._stops = StopStrings(params.stop) if params.stop else None
        self._detokenizer = None
        if params.detokenize:
            self._detokenizer = Detokenizer(
                tokenizer,
                prompt_token_ids,
                skip_special_tokens=params.skip_special_tokens,
                spaces_between_special_tokens=params.spaces_between_special_tokens,
            )

    def push(self, token_id: int, *, is_end: bool = False) -> bool:
        """Add one token. Returns True when it completes a stop string, with which the text ends.

        is_end: the token ended the sequence (end-of-sequence or stop id); it is shown only where stop strings are.
        """
        self._num_tokens += 1
        if self._detokenizer is None or (is_end and not self._include_stop):
            return False
        return self._append(self._detokenizer.push(token_id))

    def completes_stop(self, token_id: int) -> bool:
        """Return what `push` of this token would, without a change."""
        if self._stops is None or self._detokenizer is None or self._num_tokens + 1 < self._min_tokens:
            return False
        piece = self._detokenizer.plain_piece(token_id)
        return self.fork().push(token_id) if piece is None else self._stops.completes(self.text, piece)

    def fork(self) -> SequenceText:
        """Return an independent copy."""
        other = copy.copy(self)
        other._detokenizer = self._detokenizer and self._detokenizer.fork()
        return other

    def finish(self) -> bool:
        """Add what was held back. Returns True when that completes a stop string."""
        if self._detokenizer is None or self.stop_string is not None:
            return False
        return self._append(self._detokenizer.flush())

    def num_visible_chars(self) -> int:
        """Return the number of characters that can be shown while the sequence goes on: they are final."""
        if self._stops is None or self._include_stop or self.stop_string is not None:
            return len(self.text)
        return len(self.text) - self._stops.num_held_chars(self.text)

    def next_offset(self) -> int:
        """Return the index of the character that the first byte of the next token is part of."""
        return len(self.text) + (self._detokenizer.num_held_chars() if self._detokenizer else 0)

    def _append(self, piece: str) -> bool:
        if not piece:
            return False
        num_old_chars = len(self.text)
        self.text += piece
        if self._stops is None or self._num_tokens < self._min_tokens:
            return False
        match = self._stops.find(self.text, num_old_chars)
        if match is None:
            return False
        start, self.stop_string = match
        self.text = self.text[: start + (len(self.stop_string) if self._include_stop else 0)]
        return True


def text_offsets(tokenizer: Tokenizer, token_ids: Sequence[int], text: str) -> list[int]:
    """Return, for each of the tokens that stand for `text`, the index of the character that its first byte is part of.

    Tokens that the text does not have, such as a BOS that was added to it, start where their neighbours do.
    """
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=False)
    offsets: list[int] = []
    place = 0
    for token_id in token_ids:
        offsets.append(min(place + detokenizer.num_held_chars(), len(text)))
        piece = detokenizer.push(token_id)
        # tokenizers of the sentencepiece kind write a space that the text does not have before its words
        for shown in (piece, piece.removeprefix(" ")):
            if text.startswith(shown, place):
                place += len(shown)
                break
        else:
            place += 0 if token_id in tokenizer.special_ids else len(piece)
    return offsets


def _has_text(tokenizer: Tokenizer, token_id: int, skip_special_tokens: bool) -> bool:
    return tokenizer.has_id(token_id) and not (skip_special_tokens and token_id in tokenizer.special_ids)


def _context(tokenizer: Tokenizer, prompt_token_ids: Sequence[int], skip_special_tokens: bool) -> list[int]:
    """Return the end of the prompt that the first output token is decoded behind, cut where a character starts."""
    nearest = prompt_token_ids[-4 * CONTEXT_TOKENS :]
    shown = [token_id for token_id in nearest if _has_text(tokenizer, token_id, skip_special_tokens)]
    context = shown[-CONTEXT_TOKENS:]
    while context and tokenizer.decode(context, skip_special_tokens=skip_special_tokens).startswith(REPLACEMENT):
        context = context[1:]
    # nothing is left where the prompt itself ends with U+FFFD
    return context or shown[-CONTEXT_TOKENS:]
