"""`POST /v1/responses`: conversations in the form of OpenAI's newer API."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from time import time
from typing import Any, Final, Literal

import msgspec
from msgspec import UNSET, Struct, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from octavo.core.outputs import RequestOutput
from octavo.server.context import ServerContext
from octavo.server.errors import ApiError
from octavo.server.formats.events import (
    OutputEvent,
    ReasoningDelta,
    TextDelta,
    ToolCallBegin,
    ToolCallDelta,
    ToolCallEnd,
)
from octavo.server.logprobs import ContentLogprob
from octavo.server.schema.responses import FunctionTool, ResponsesRequest
from octavo.server.sending import StreamEvent
from octavo.server.turn import ShimTurn

_ERROR_CODES: Final = {400: "invalid_prompt", 429: "rate_limit_exceeded"}
_IDS: Final = {"message": "msg", "reasoning": "rs", "function_call": "fc", "custom_tool_call": "ctc"}
"""What the ids of items begin with, by their types."""
_OF_CALLS: Final = {
    "function_call": ("arguments", "response.function_call_arguments"),
    "custom_tool_call": ("input", "response.custom_tool_call_input"),
}
"""By the type of the item: the field of a call that the model writes, and the name of its events."""


class InputTokensDetails(Struct, frozen=True):
    """How many tokens of the input were in the prefix cache. Cache writes are not billed."""

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
    prompt_cache_options: dict[str, Any] | None
    prompt_cache_retention: str | None
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


async def stored(context: ServerContext, request: Request) -> Response:
    """Return an error: no response is stored."""
    raise ApiError(404, "responses are not stored; send the whole input each time", code="response_not_stored")


class _Output:
    """The items of a response, and the events by which they grow.

    unique: suffix of the items' ids. tools: by the name that the model knows, each with its namespace.
    """

    def __init__(self, unique: str, tools: Mapping[str, tuple[str | None, FunctionTool]]) -> None:
        self.items: list[OutputItem] = []
        self.num_events = 0
        self._unique = unique
        self._tools = tools
        self._item: OutputItem | None = None
        self._pieces: list[str] = []
        self._logprobs: list[ContentLogprob] = []
        self._without_text: list[ContentLogprob] = []
        self._num_noted = 0

    def event(self, kind: str, **fields: Any) -> StreamEvent:
        self.num_events += 1
        return {"type": kind, "sequence_number": self.num_events - 1, **fields}

    def note(self, logprobs: list[ContentLogprob], num_reasoning: int) -> None:
        """Keep the log-probabilities of new tokens for the next text: tokens that are part of a character, or end the
        output, have no text yet. num_reasoning: how many of all tokens so far are reasoning, which is no text."""
        self._without_text += logprobs
        self._num_noted += len(logprobs)
        num_kept = max(0, self._num_noted - num_reasoning)
        self._without_text = self._without_text[max(0, len(self._without_text) - num_kept) :]

    def add(self, event: OutputEvent) -> Iterator[StreamEvent]:
        match event:
            case TextDelta(text):
                logprobs, self._without_text = self._without_text, []
                if self._kind != "message":
                    yield from self._begin("message", role="assistant", content=[])
                self._pieces.append(text)
                self._logprobs += logprobs
                yield self._of_item("response.output_text.delta", content_index=0, delta=text, logprobs=logprobs)
            case ReasoningDelta(text):
                if self._kind != "reasoning":
                    yield from self._begin("reasoning", summary=[], content=[])
                self._pieces.append(text)
                yield self._of_item("response.reasoning_text.delta", content_index=0, delta=text)
            case ToolCallBegin(_, call_id, name):
                namespace, tool = self._tools.get(name, (None, None))
                kind = "custom_tool_call" if tool is not None and tool.type == "custom" else "function_call"
                call = {_OF_CALLS[kind][0]: "", "name": name if tool is None else tool.name}
                if namespace is not None:
                    call["namespace"] = namespace
                yield from self._begin(kind, call_id=call_id, **call)
            case ToolCallDelta(_, arguments):
                assert self._item is not None, "the call has begun"
                self._pieces.append(arguments)
                yield self._of_item(f"{_OF_CALLS[self._item.type][1]}.delta", delta=arguments)
            case ToolCallEnd(_, is_cut):
                yield from self.end("incomplete" if is_cut else "completed")

    def end(self, status: str = "completed") -> Iterator[StreamEvent]:
        if self._item is not None and self._item.type == "message" and self._without_text:
            yield from self.add(TextDelta(""))
        item, text = self._item, "".join(self._pieces)
        if item is None:
            return
        if item.type in _OF_CALLS:
            field, event = _OF_CALLS[item.type]
            setattr(item, field, text)
            named = {"name": item.name} if item.type == "function_call" else {}
            yield self._of_item(f"{event}.done", **named, **{field: text})
        else:
            part = self._part(text)
            fields: dict[str, Any] = {} if part.logprobs is UNSET else {"logprobs": part.logprobs}
            kind = f"response.{part.type}.done"
            yield self._of_item(kind, content_index=0, text=text, **fields)
            yield self._of_item("response.content_part.done", content_index=0, part=part)
            item.content = [part]
        item.status = status
        yield self.event("response.output_item.done", output_index=len(self.items) - 1, item=item)
        self._item = None

    @property
    def _kind(self) -> str | None:
        return None if self._item is None else self._item.type

    def _begin(self, kind: str, **fields: Any) -> Iterator[StreamEvent]:
        yield from self.end()
        item_id = f"{_IDS[kind]}_{self._unique}_{len(self.items)}"
        item = OutputItem(type=kind, id=item_id, status="in_progress", **fields)
        self._item, self._pieces, self._logprobs = item, [], []
        self.items.append(item)
        begun = msgspec.structs.replace(item)
        yield self.event("response.output_item.added", output_index=len(self.items) - 1, item=begun)
        if item.content is not UNSET:
            yield self._of_item("response.content_part.added", content_index=0, part=self._part(""))

    def _part(self, text: str) -> OutputPart:
        if self._kind == "reasoning":
            return OutputPart(type="reasoning_text", text=text)
        return OutputPart(type="output_text", text=text, annotations=[], logprobs=self._logprobs)

    def _of_item(self, kind: str, **fields: Any) -> StreamEvent:
        return self.event(kind, item_id=self.items[-1].id, output_index=len(self.items) - 1, **fields)


class ModelTurn(ShimTurn[ResponsesRequest]):
    """Return the next turn of a conversation as items of a response, whole or as a stream.

    A stream has the response as it begins, its items as they grow, and the response as it ends.
    """

    kind = ResponsesRequest
    id_prefix = "resp_"
    end_of_stream = b""

    def begin(self) -> None:
        self._output = _Output(self.id.removeprefix(self.id_prefix), self.shim.named_tools())
        self._finish_reason: str | None = None

    def whole(self, outputs: Sequence[RequestOutput]) -> ModelResponse:
        for _ in self.chunks(0, outputs[0]):
            pass
        *_, last = self.last_chunks()
        response: ModelResponse = last["response"]
        return response

    def chunks(self, index: int, output: RequestOutput) -> Iterator[StreamEvent]:
        if not self._output.num_events:
            yield self._output.event("response.created", response=self._response("in_progress"))
            yield self._output.event("response.in_progress", response=self._response("in_progress"))
        [completion] = output.outputs
        events = self.events(output, completion)
        if (found := self.logprobs(completion)) is not None:
            self._output.note(found.content, self.reasoning_tokens() or 0)
        for event in events:
            yield from self._output.add(event)
        self._finish_reason = self.finish_reason(completion)

    def last_chunks(self) -> Iterator[StreamEvent]:
        status = "incomplete" if self._finish_reason == "length" else "completed"
        if not self._output.items:
            yield from self._output.add(TextDelta(""))
        yield from self._output.end(status)
        yield self._output.event(f"response.{status}", response=self._response(status))

    def failed(self, error: ApiError) -> bytes:
        response = self._response("failed")
        code = _ERROR_CODES.get(error.status, "server_error")
        response.error = ResponseError(code, str(error))
        return self.event(msgspec.json.Encoder(), self._output.event("response.failed", response=response))

    def _response(self, status: str) -> ModelResponse:
        shim, reasoning, is_open = self.shim, self.shim.reasoning, status == "in_progress"
        return ModelResponse(
            id=self.id,
            created_at=self.frame["created"],
            completed_at=None if is_open else int(time()),
            status=status,
            incomplete_details=IncompleteDetails("max_output_tokens") if status == "incomplete" else None,
            model=self.frame["model"],
            output=[] if is_open else self._output.items,
            usage=None if is_open else self._usage(),
            instructions=shim.instructions,
            max_output_tokens=shim.max_output_tokens,
            max_tool_calls=shim.max_tool_calls,
            metadata=shim.metadata or {},
            parallel_tool_calls=shim.parallel_tool_calls is not False,
            prompt_cache_key=shim.prompt_cache_key,
            prompt_cache_options=shim.prompt_cache_options,
            prompt_cache_retention=shim.prompt_cache_retention,
            reasoning={} if reasoning is None else {"effort": reasoning.effort, "summary": reasoning.summary},
            safety_identifier=shim.safety_identifier,
            service_tier=shim.service_tier,
            temperature=self.params.temperature,
            text={"format": (shim.text and shim.text.format) or {"type": "text"}},
            tool_choice=shim.tool_choice or "auto",
            tools=shim.tools or [],
            top_logprobs=shim.top_logprobs or 0,
            top_p=self.params.top_p,
            user=shim.user,
        )

    def _usage(self) -> ResponseUsage:
        usage = self.usage()
        return ResponseUsage(
            input_tokens=usage.prompt_tokens,
            input_tokens_details=InputTokensDetails(usage.prompt_tokens_details.cached_tokens),
            output_tokens=usage.completion_tokens,
            output_tokens_details=OutputTokensDetails(self.reasoning_tokens() or 0),
            total_tokens=usage.total_tokens,
        )
