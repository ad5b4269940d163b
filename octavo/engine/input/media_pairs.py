"""Queries and documents with images, as models for vectors and for pairs read them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec

from octavo.core.prompt import Prompt
from octavo.engine.input.input_processor import InputProcessor
from octavo.engine.input.vector_input import names_both_roles
from octavo.engine.text.chat_template import ChatOptions
from octavo.errors import InvalidRequest

Content = str | list[dict[str, Any]]
"""A text, or parts of a message, as chat templates read them."""


def media_prompt(tools: InputProcessor, content: Content, field: str) -> Prompt:
    """Return the prompt of a query or a document for a model that makes vectors: a message in the chat template, or for
    a model without one its parts, one behind the other. field: where a request has it. Raises InvalidRequest."""
    messages = [{"role": "user", "content": content}]
    if tools.chat_template is not None:
        return _rendered(tools, messages, [field], ChatOptions(add_generation_prompt=False))
    with _called([field]):
        [message], media, places, _ = tools.media.parted(messages)
    markers = {kind: tools.tokenizer.token_text(one) for kind, one in tools.media.markers.items()}
    text = "".join(part["text"] if part["type"] == "text" else markers[part["type"]] for part in message["content"])
    return Prompt(text=text, multi_modal_data=media, media_places=_renamed(places, [field]))


def media_pair(
    tools: InputProcessor, pair: tuple[Content, Content], instruct: str | None, fields: tuple[str, str]
) -> Prompt:
    """Return the prompt of a query and a document for a model that scores pairs, by a chat template with these roles.
    fields: where a request has them. Raises InvalidRequest."""
    if not names_both_roles(tools.chat_template):
        field = next(name for name, content in zip(fields, pair, strict=True) if not isinstance(content, str))
        raise InvalidRequest(
            f"{field} is not text alone, and only a chat template with the roles query and document takes such pairs; "
            "start the server with --chat-template",
            field=field,
        )
    messages = [{"role": role, "content": each} for role, each in zip(("query", "document"), pair, strict=True)]
    if instruct is None:
        return _rendered(tools, messages, fields, ChatOptions())
    return _rendered(tools, [{"role": "system", "content": instruct}, *messages], ("instruction", *fields))


def _rendered(
    tools: InputProcessor, messages: Any, fields: Sequence[str], options: ChatOptions | None = None
) -> Prompt:
    with _called(fields):
        prompt = tools.render_chat(messages, options)
    return msgspec.structs.replace(prompt, media_places=_renamed(prompt.media_places or {}, fields))


def _renamed(places: Mapping[str, list[str]], fields: Sequence[str]) -> dict[str, list[str]]:
    return {kind: [_name(each, fields) for each in found] for kind, found in places.items()}


def _name(text: str, fields: Sequence[str]) -> str:
    """Return a text with a request's names of the messages."""
    for index, field in enumerate(fields):
        text = text.replace(f"messages[{index}]", field)
    return text


@contextmanager
def _called(fields: Sequence[str]) -> Iterator[None]:
    try:
        yield
    except InvalidRequest as error:
        error.field = fields[-1] if error.field == "messages" else _name(error.field or "", fields)
        error.args = (_name(str(error), fields),)
        raise
