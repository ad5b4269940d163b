"""Log-probabilities in the two shapes of the OpenAI API."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from msgspec import Struct, UnsetType

from octavo.core.outputs import Logprob

Position = dict[int, Logprob]
"""The likeliest tokens at one position, and the drawn one."""

PromptLogprobsField = list[Position | None] | UnsetType


class TokenLogprob(Struct, frozen=True, gc=False):
    """A token of a chat response. `bytes` is None for a token whose bytes are not a character by themselves.

    A response may have hundreds of thousands: the garbage collector visits neither them nor tuples of numbers.
    """

    token: str
    logprob: float
    bytes: tuple[int, ...] | None


class ContentLogprob(TokenLogprob, frozen=True, gc=False):
    """A token that was drawn, and the likeliest ones at its place."""

    top_logprobs: list[TokenLogprob]


class ChatLogprobs(Struct, frozen=True):
    """Log-probabilities of a chat choice."""

    content: list[ContentLogprob]
    refusal: None = None


class CompletionLogprobs(Struct, frozen=True):
    """Log-probabilities of a completion choice; with echo the prompt's come first, its first token has none."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


def chat_logprobs(
    token_ids: Sequence[int], positions: Sequence[Position], num_top: int, bytes_of: Callable[[int], bytes | None]
) -> ChatLogprobs:
    """Return the log-probability of each token, and those of the `num_top` likeliest, or of all with -1. `bytes_of`
    returns the bytes of a token id, None if unknown; joined they are those of the text, also if a character has several
    tokens."""

    def described(token_id: int, logprob: Logprob) -> TokenLogprob:
        token_bytes = bytes_of(token_id)
        return TokenLogprob(
            _text(token_id, logprob), logprob.logprob, None if token_bytes is None else tuple(token_bytes)
        )

    content = []
    for token_id, position in zip(token_ids, positions, strict=True):
        drawn = described(token_id, position[token_id])
        top = [described(other, logprob) for other, logprob in _likeliest(position, num_top)]
        content.append(ContentLogprob(drawn.token, drawn.logprob, drawn.bytes, top))
    return ChatLogprobs(content)


def completion_logprobs(
    texts: Sequence[str],
    token_ids: Sequence[int],
    positions: Sequence[Position | None],
    num_top: int,
    offsets: list[int],
) -> CompletionLogprobs:
    """Return parallel lists over tokens with these texts, which start at these offsets in the text of the choice.

    A position is None for the first token of a prompt, which has no predecessor.
    """
    token_logprobs: list[float | None] = []
    top_logprobs: list[dict[str, float] | None] = []
    for text, token_id, position in zip(texts, token_ids, positions, strict=True):
        token_logprobs.append(None if position is None else position[token_id].logprob)
        top_logprobs.append(None if position is None else _top(position, num_top, text, position[token_id]))
    return CompletionLogprobs(list(texts), token_logprobs, top_logprobs, offsets)


def by_ids(positions: Sequence[Position | None]) -> list[Any]:
    """Return positions without the texts of tokens, which are then shown by their ids."""
    return [
        position
        and {token_id: msgspec.structs.replace(each, decoded_token=None) for token_id, each in position.items()}
        for position in positions
    ]


def token_text(token_id: int, position: Position | None) -> str:
    """Return the text of a token at its position; a token without text is shown by its id."""
    return f"token_id:{token_id}" if position is None else _text(token_id, position[token_id])


def _text(token_id: int, logprob: Logprob) -> str:
    return f"token_id:{token_id}" if logprob.decoded_token is None else logprob.decoded_token


def _top(position: Position, num_top: int, text: str, drawn: Logprob) -> dict[str, float]:
    top: dict[str, float] = {}
    for token_id, logprob in _likeliest(position, num_top):
        # two ids may have the same text: the likelier one is kept
        top.setdefault(_text(token_id, logprob), logprob.logprob)
    top.setdefault(text, drawn.logprob)
    return top


def _likeliest(position: Position, num_top: int) -> list[tuple[int, Logprob]]:
    ranked = sorted(position.items(), key=lambda item: -item[1].logprob)
    return ranked if num_top < 0 else ranked[:num_top]
