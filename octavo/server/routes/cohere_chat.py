"""`POST /v2/chat`: conversations in the form of Cohere's API."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final, Literal

from msgspec import UNSET, Struct, UnsetType

from octavo.core.outputs import CompletionOutput, RequestOutput
from octavo.server.formats.events import (
    OutputEvent,
    ReadCall,
    ReasoningDelta,
    TextDelta,
    ToolCallBegin,
    ToolCallDelta,
    ToolCallEnd,
    joined,
)
from octavo.server.schema.cohere_chat import CohereChatRequest
from octavo.server.schema.tools import ToolCall
from octavo.server.sending import StreamEvent
from octavo.server.turn import ShimTurn

_REASONS: Final = {"length": "MAX_TOKENS", "tool_calls": "TOOL_CALL", "stop": "COMPLETE"}


class CohereTokens(Struct, frozen=True):
    """Token counts."""

    input_tokens: int
    output_tokens: int


class CohereUsage(Struct, frozen=True):
    """Token counts of a response; all are counted."""

    billed_units: CohereTokens
    tokens: CohereTokens
    cached_tokens: int


class CohereLogprobs(Struct, frozen=True):
    """A token of the response with its log-probability."""

    text: str
    token_ids: list[int]
    logprobs: list[float]


class CohereContent(Struct, kw_only=True):
    """A part of the text, or of the reasoning."""

    type: Literal["text", "thinking"]
    text: str | UnsetType = UNSET
    thinking: str | UnsetType = UNSET


class CohereAnswer(Struct, kw_only=True):
    """The message of the model."""

    role: Literal["assistant"] = "assistant"
    content: list[CohereContent] | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


class CohereChatResponse(Struct, kw_only=True):
    """Response of `POST /v2/chat`."""

    id: str
    finish_reason: str
    message: CohereAnswer
    usage: CohereUsage
    logprobs: list[CohereLogprobs] | UnsetType = UNSET


class _Parts:
    """The events by which the parts of a message grow."""

    def __init__(self) -> None:
        self._num = 0
        self._kind: Literal["text", "thinking"] | None = None

    def add(self, event: OutputEvent) -> Iterator[StreamEvent]:
        match event:
            case TextDelta(text):
                yield from self._content("text", text)
            case ReasoningDelta(text):
                yield from self._content("thinking", text)
            case ToolCallBegin(index, call_id, name):
                yield from self.end()
                call = ToolCall.of(ReadCall(call_id, name))
                yield _changed("tool-call-start", index, tool_calls=call)
            case ToolCallDelta(index, arguments):
                yield _changed("tool-call-delta", index, tool_calls={"function": {"arguments": arguments}})
            case ToolCallEnd(index):
                yield {"type": "tool-call-end", "index": index}

    def _content(self, kind: Literal["text", "thinking"], text: str) -> Iterator[StreamEvent]:
        if self._kind != kind:
            yield from self.end()
            self._kind = kind
            yield _changed("content-start", self._num, content={"type": kind, kind: ""})
        yield _changed("content-delta", self._num, content={kind: text})

    def end(self) -> Iterator[StreamEvent]:
        if self._kind is not None:
            yield {"type": "content-end", "index": self._num}
            self._kind, self._num = None, self._num + 1


class CohereChat(ShimTurn[CohereChatRequest]):
    """Return the next turn of a conversation as Cohere's API has it, whole or as a stream.

    A stream has the message as it begins, its parts and calls as they grow, and why it ends.
    """

    kind = CohereChatRequest
    id_prefix = ""

    def begin(self) -> None:
        self._parts = _Parts()
        self._has_begun = False
        self._reason = "COMPLETE"
        self._logprobs: list[CohereLogprobs] = []
        """Log-probabilities of tokens that no event has contained yet."""

    def whole(self, outputs: Sequence[RequestOutput]) -> CohereChatResponse:
        [completion] = outputs[0].outputs
        found = joined(self.events(outputs[0], completion))
        self._set_reason(completion)
        content = [CohereContent(type="thinking", thinking=found.reasoning)] if found.reasoning else []
        content += [CohereContent(type="text", text=found.text)] if found.text else []
        message = CohereAnswer(content=content or UNSET, tool_calls=[*map(ToolCall.of, found.calls)] or UNSET)
        return CohereChatResponse(
            id=self.id,
            finish_reason=self._reason,
            message=message,
            usage=self._usage(),
            logprobs=self._token_logprobs(completion) or UNSET,
        )

    def chunks(self, index: int, output: RequestOutput) -> Iterator[StreamEvent]:
        if not self._has_begun:
            self._has_begun = True
            yield {"type": "message-start", "id": self.id, "delta": {"message": CohereAnswer()}}
        [completion] = output.outputs
        self._logprobs += self._token_logprobs(completion)
        for each in self.events(output, completion):
            for event in self._parts.add(each):
                if self._logprobs and event["type"] == "content-delta":
                    event["logprobs"], self._logprobs = self._logprobs, []
                yield event
        self._set_reason(completion)

    def last_chunks(self) -> Iterator[StreamEvent]:
        yield from self._parts.end()
        logprobs = {"logprobs": self._logprobs} if self._logprobs else {}
        delta = {"finish_reason": self._reason, "usage": self._usage()}
        yield {"type": "message-end", "id": self.id, "delta": delta, **logprobs}

    def _set_reason(self, completion: CompletionOutput) -> None:
        if (reason := self.finish_reason(completion)) is not None:
            self._reason = _reason_of(reason, completion.stop_reason)

    def _token_logprobs(self, completion: CompletionOutput) -> list[CohereLogprobs]:
        found = self.logprobs(completion)
        if found is None:
            return []
        tokens = zip(found.content, completion.token_ids, strict=True)
        return [CohereLogprobs(each.token, [token_id], [each.logprob]) for each, token_id in tokens]

    def _usage(self) -> CohereUsage:
        usage = self.usage()
        tokens = CohereTokens(usage.prompt_tokens, usage.completion_tokens)
        return CohereUsage(tokens, tokens, usage.prompt_tokens_details.cached_tokens)


def _reason_of(reason: str, stop: int | str | None) -> str:
    return "STOP_SEQUENCE" if reason == "stop" and isinstance(stop, str) else _REASONS.get(reason, "ERROR")


def _changed(kind: str, index: int, **message: Any) -> StreamEvent:
    return {"type": kind, "index": index, "delta": {"message": message}}
