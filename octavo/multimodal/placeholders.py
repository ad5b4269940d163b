"""The tokens of a prompt that stand for its images, videos and sounds."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence
from functools import cached_property
from itertools import groupby
from typing import Any, Final, NamedTuple

from octavo.errors import CheckpointError, InvalidRequest

_MOST_LINES: Final = 31
"""Most line breaks in one token that are looked for."""


class Words(NamedTuple):
    """What stands for a sound in texts, and the texts of the tokens that stand for it and for each vector of it.

    vector: "" for the same token. others: what the first one is called in other tokenizers."""

    text: str
    marker: str
    vector: str = ""
    others: tuple[str, ...] = ()

    def ids(self, encode: Callable[[str], list[int]]) -> list[int]:
        """Return both tokens. Raises CheckpointError where a tokenizer lacks one."""
        found: list[int] = []
        # what a tokenizer does not know may be one token
        unknown = () if self.vector else encode("\ufdd0")
        for words in filter(any, ((self.vector,), (self.marker, *self.others))):
            tokens = [ids[0] for word in words if len(ids := encode(word)) == 1 and ids[0] not in (*found, *unknown)]
            if not tokens:
                raise CheckpointError(
                    f"the tokenizer has no token {' or '.join(words)}, which stands for sounds of this model; download "
                    "its files again, or set limit_mm_per_prompt audio=0"
                )
            found = [*tokens[:1], *found]
        return found if self.vector else found * 2


def matched(
    kind: str,
    marker: tuple[int, str],
    token_ids: Sequence[int],
    brought: Sequence[Any],
    limit: int,
    room: int | None = None,
) -> Iterator[Any]:
    """Return what the markers of a kind stand for.

    marker: the token, and its text, "" where that is not known. room: the most that a model has room for, None for any
    number.

    Raises InvalidRequest for another number of them.
    """
    token, text = marker
    num_markers = sum(each == token for each in token_ids)
    if len(brought) != num_markers:
        raise InvalidRequest(
            f"the prompt has {_count(num_markers, 'placeholder')} for {kind}s, but {_count(len(brought), kind)} "
            f"came with it; write one placeholder{text and f', {text.strip()},'} for each {kind}",
            field="multi_modal_data",
        )
    if len(brought) > limit:
        raise InvalidRequest(
            f"the prompt has {len(brought)} {kind}s, must have at most {limit} (limit_mm_per_prompt)",
            field="multi_modal_data",
        )
    if room is not None and len(brought) > room:
        raise InvalidRequest(
            f"the prompt has {len(brought)} {kind}s, must have at most {room} (this model has room for no more)",
            field="multi_modal_data",
        )
    return iter(brought)


def alone(token_ids: Sequence[int], marker: int, around: Sequence[int]) -> list[int]:
    """Return the prompt of an image that is a prompt of its own. around: tokens that stand around every text.

    Raises InvalidRequest for a prompt with a text.
    """
    if not {*token_ids} <= {marker, *around}:
        raise InvalidRequest(
            "the prompt has a text and an image, but this model makes a vector of one of them; send two prompts, that "
            "of the image with an empty text",
            field="prompt",
        )
    return [marker]


def no_text(token_id: int) -> str:
    """Return "", where the texts of tokens are not known."""
    return ""


def spans_of(tokens: Sequence[int], those: Container[int], offset: int) -> Iterator[tuple[int, int]]:
    """Yield (offset, length) of the runs of `those` tokens."""
    for is_token, run in groupby(tokens, lambda each: each in those):
        length = sum(1 for _ in run)
        if is_token:
            yield offset, length
        offset += length


class JoinedLines:
    """Joins the line breaks around images and sounds with those of the prompt, as the tokenizer does in one text."""

    def __init__(self, encode: Callable[[str], list[int]]) -> None:
        """encode: returns the ids of a text."""
        self._encode = encode

    @cached_property
    def _counts(self) -> dict[int, int]:
        """The number of line breaks that a token is, by token."""
        tokens = [self._encode("\n" * count) for count in range(1, 1 + _MOST_LINES)]
        return {ids[0]: count for count, ids in enumerate(tokens, 1) if len(ids) == 1}

    def behind(self, written: list[int], tokens: list[int]) -> list[int]:
        """Return tokens behind `written`, whose last line breaks are removed where they are joined with theirs."""
        count, num_tail, num_head = 0, 0, 0
        while num_tail < len(written) and written[-1 - num_tail] in self._counts:
            count += self._counts[written[-1 - num_tail]]
            num_tail += 1
        while num_head < len(tokens) and tokens[num_head] in self._counts:
            count += self._counts[tokens[num_head]]
            num_head += 1
        if not num_tail or not num_head:
            return tokens
        del written[len(written) - num_tail :]
        return [*self._encode("\n" * count), *tokens[num_head:]]


def _count(number: int, word: str) -> str:
    return f"{number} {word}" + "s" * (number != 1)
