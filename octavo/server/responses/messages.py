"""The responses of `POST /v1/messages` and `POST /v1/messages/count_tokens`, the events of a stream, and errors."""

from __future__ import annotations

from typing import Any, Literal

from msgspec import UNSET, Struct, UnsetType


class MessageUsage(Struct, frozen=True):
    """Token counts: those of the prompt that were in the prefix cache are not among `input_tokens`."""

    input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    cache_creation_input_tokens: int = 0


class ContentBlock(Struct, kw_only=True):
    """A block of the output: `text`, `thinking` or `tool_use`."""

    type: str
    text: str | UnsetType = UNSET
    thinking: str | UnsetType = UNSET
    signature: str | UnsetType = UNSET
    id: str | UnsetType = UNSET
    name: str | UnsetType = UNSET
    input: dict[str, Any] | UnsetType = UNSET


class MessageResponse(Struct, kw_only=True):
    """Response of `POST /v1/messages`."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[ContentBlock]
    stop_reason: str | None = None
    stop_sequence: str | None = None
    usage: MessageUsage


class MessageDelta(Struct, kw_only=True):
    """What is new of a block, or of the message."""

    type: str | UnsetType = UNSET
    text: str | UnsetType = UNSET
    thinking: str | UnsetType = UNSET
    signature: str | UnsetType = UNSET
    partial_json: str | UnsetType = UNSET
    stop_reason: str | UnsetType | None = UNSET
    stop_sequence: str | UnsetType | None = UNSET


class MessageEvent(Struct, kw_only=True):
    """An event of a stream; the fields depend on its type."""

    type: str
    message: MessageResponse | UnsetType = UNSET
    index: int | UnsetType = UNSET
    content_block: ContentBlock | UnsetType = UNSET
    delta: MessageDelta | UnsetType = UNSET
    usage: MessageUsage | UnsetType = UNSET


class TokenCount(Struct, frozen=True):
    """Response of `POST /v1/messages/count_tokens`."""

    input_tokens: int
