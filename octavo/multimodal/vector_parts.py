"""Vectors in the messages of conversations: a private character goes through templates in the place of each part."""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import msgspec

from octavo.core.media import MediaInput
from octavo.core.prompt import Prompt
from octavo.core.prompt_embeds import FIELD, decoded_embeds, read_embeds
from octavo.core.request_limits import REQUEST_LIMITS, check_entries
from octavo.errors import InvalidRequest

_MARK: Final = "\U0010fffc"
_ANY_MARK: Final = re.compile(_MARK + r"|\\udbff\\udffc")
"""A mark, also as JSON in ASCII writes it."""

Encode = Callable[[str, bool, Sequence[int]], list[int]]
"""Returns the token ids of a text, without special tokens around it where False, none of which spans the positions."""


def without_vectors(messages: Any, check: Callable[[MediaInput], None]) -> tuple[Any, list[MediaInput]]:
    """Return messages in which a mark is the text of each part `{"type": "prompt_embeds", "data": …}`, and what the
    marks stand for, in order. data: an array or a tensor, or a file of numpy in Base64. check: raises InvalidRequest
    for vectors that the model does not take.

    What is no message with a list of parts stays as it is. Raises InvalidRequest.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes):
        return messages, []
    found: list[MediaInput] = []
    marked = [_message(message, f"messages[{index}].content", found, check) for index, message in enumerate(messages)]
    if not found:
        return messages, []
    check_entries("messages", len(found), REQUEST_LIMITS[FIELD].entries)
    return marked, found


def prompt_of(text: str, cuts: Sequence[int], vectors: Sequence[MediaInput], encode: Encode) -> Prompt:
    """Return the prompt of a text with marks: tokens, and vectors between them. cuts: positions that no token spans, in
    their order.

    Raises InvalidRequest where the template has left out or repeated a mark, or a text has one.
    """
    marks = [*_ANY_MARK.finditer(text)]
    if len(marks) != len(vectors):
        raise InvalidRequest(
            f"the messages have {len(vectors)} parts with vectors, and the text that the chat template writes has "
            f"{len(marks)} places for them; leave out what it does not read, and the character U+10FFFC",
            field="messages",
        )
    token_ids: list[int] = []
    media: list[MediaInput] = []
    starts, ends = (0, *(mark.end() for mark in marks)), (*(mark.start() for mark in marks), len(text))
    for start, end, embeds in zip(starts, ends, (*vectors, None), strict=True):
        inside = [cut - start for cut in cuts[bisect_right(cuts, start) : bisect_left(cuts, end)]]
        # a text behind vectors goes on: it is no beginning
        token_ids += encode(text[start:end], False, [*([0] if media else []), *inside]) if start < end else []
        if embeds is not None:
            media.append(msgspec.structs.replace(embeds, spans=((len(token_ids), embeds.num_embeddings),)))
            token_ids += [0] * embeds.num_embeddings
    return Prompt(None, token_ids, False, media=tuple(media))


def _message(message: Any, field: str, found: list[MediaInput], check: Callable[[MediaInput], None]) -> Any:
    content = message.get("content") if isinstance(message, Mapping) else None
    if not isinstance(content, Sequence) or isinstance(content, str | bytes):
        return message
    parts: list[Any] = []
    for number, part in enumerate(content):
        if isinstance(part, Mapping) and part.get("type") == FIELD:
            found.append(_read(part.get("data"), f"{field}[{number}].data", check))
            parts.append({"type": "text", "text": _MARK})
        else:
            parts.append(part)
    return {**message, "content": parts}


def _read(data: Any, field: str, check: Callable[[MediaInput], None]) -> MediaInput:
    try:
        embeds = decoded_embeds(data) if isinstance(data, str) else read_embeds(data)
        check(embeds)
    except InvalidRequest as error:
        raise InvalidRequest(str(error).replace(FIELD, field, 1), field=field, code=error.code) from error
    return embeds
