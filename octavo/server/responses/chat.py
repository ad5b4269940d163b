"""The responses of `POST /v1/chat/completions`."""

from __future__ import annotations

from typing import Any, Literal

from msgspec import UNSET, Struct, UnsetType

from octavo.server.responses.common import Generated, PromptLogprobsField, Usage


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


class FunctionCall(Struct, kw_only=True):
    """The name of a function and its arguments as JSON; in a chunk, what is new of them."""

    name: str | UnsetType = UNSET
    arguments: str


class CustomCall(Struct, kw_only=True):
    """The name of a custom tool and its input; in a chunk, what is new of it."""

    name: str | UnsetType = UNSET
    input: str


class ToolCall(Struct, kw_only=True):
    """A call that the model makes; in a chunk, what is new of it."""

    index: int | UnsetType = UNSET
    id: str | UnsetType = UNSET
    type: Literal["function", "custom"] | UnsetType = UNSET
    function: FunctionCall | UnsetType = UNSET
    custom: CustomCall | UnsetType = UNSET

    @classmethod
    def of(cls, arguments: str, *, is_custom: bool, name: str | UnsetType = UNSET, **fields: Any) -> ToolCall:
        """Return a call, or what is new of it. arguments: of a custom tool, its input. name: of a call that begins."""
        kind: Literal["function", "custom"] = "custom" if is_custom else "function"
        return cls(
            type=UNSET if name is UNSET else kind,
            function=UNSET if is_custom else FunctionCall(name=name, arguments=arguments),
            custom=CustomCall(name=name, input=arguments) if is_custom else UNSET,
            **fields,
        )


class ChatMessage(Struct, kw_only=True):
    """What the model said. The reasoning has two names: clients know one or the other."""

    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: None = None
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatChoice(Struct, kw_only=True):
    """One of the responses of the model."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletionResponse(Generated, kw_only=True):
    """Response of `POST /v1/chat/completions`."""

    object: Literal["chat.completion"] = "chat.completion"
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: PromptLogprobsField = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class Delta(Struct, kw_only=True):
    """What is new in a chunk: the role, or text, or reasoning, or a call, or nothing."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatChunkChoice(Struct, kw_only=True):
    """What is new of one of the responses of the model."""

    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletionChunk(Generated, kw_only=True):
    """A chunk of the stream of `POST /v1/chat/completions`."""

    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
