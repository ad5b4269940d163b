"""The responses of `POST /v1/responses` and `POST /v1/responses/input_tokens`, and the events of a stream."""

from __future__ import annotations

from typing import Any, Literal

from msgspec import UNSET, Struct, UnsetType

from octavo.server.responses.chat import ContentLogprob


class InputTokensDetails(Struct, frozen=True):
    """How many tokens of the input were in the prefix cache. Nothing is billed for what is written to it."""

    cached_tokens: int
    cache_write_tokens: int = 0


class OutputTokensDetails(Struct, frozen=True):
    """How many tokens of the output are reasoning."""

    reasoning_tokens: int


class ResponseUsage(Struct, frozen=True):
    """Token counts of a response."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class InputTokens(Struct, frozen=True):
    """Response of `POST /v1/responses/input_tokens`."""

    input_tokens: int
    object: str = "response.input_tokens"


class OutputPart(Struct, kw_only=True):
    """A piece of text in an item: `output_text` of a message, `reasoning_text` of reasoning."""

    type: str
    text: str
    annotations: list[Any] | UnsetType = UNSET
    logprobs: list[ContentLogprob] | UnsetType = UNSET


class OutputItem(Struct, kw_only=True):
    """An item of the output: a `message`, `reasoning`, a `function_call` or a `custom_tool_call`."""

    type: str
    id: str
    status: str
    role: Literal["assistant"] | UnsetType = UNSET
    content: list[OutputPart] | UnsetType = UNSET
    summary: list[Any] | UnsetType = UNSET
    call_id: str | UnsetType = UNSET
    namespace: str | UnsetType = UNSET
    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET
    input: str | UnsetType = UNSET


class ResponseError(Struct, frozen=True):
    """Why a response has failed."""

    code: str
    message: str


class IncompleteDetails(Struct, frozen=True):
    """Why a response is not complete."""

    reason: str


class ModelResponse(Struct, kw_only=True):
    """Response of `POST /v1/responses`: the output, and the fields of the request."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    completed_at: int | None = None
    status: str
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    model: str
    output: list[OutputItem]
    usage: ResponseUsage | None = None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    metadata: dict[str, Any]
    parallel_tool_calls: bool
    prompt_cache_key: str | None
    reasoning: dict[str, Any]
    safety_identifier: str | None
    service_tier: str | None
    temperature: float
    text: dict[str, Any]
    tool_choice: Any
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    user: str | None
    background: bool = False
    previous_response_id: None = None
    store: bool = False
    truncation: str = "disabled"


class ResponseEvent(Struct, kw_only=True):
    """An event of a stream; the fields depend on its type."""

    type: str
    sequence_number: int
    response: ModelResponse | UnsetType = UNSET
    item_id: str | UnsetType = UNSET
    output_index: int | UnsetType = UNSET
    content_index: int | UnsetType = UNSET
    item: OutputItem | UnsetType = UNSET
    part: OutputPart | UnsetType = UNSET
    delta: str | UnsetType = UNSET
    text: str | UnsetType = UNSET
    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET
    input: str | UnsetType = UNSET
    logprobs: list[ContentLogprob] | UnsetType = UNSET
