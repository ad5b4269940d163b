"""`POST /v1/chat/completions`: the next turn of a conversation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, Final, Literal

from msgspec import UNSET, Struct, UnsetType
from starlette.requests import Request

from octavo.core.outputs import CompletionOutput, RequestOutput, WeightVersionSpan
from octavo.core.prompt import Prompt
from octavo.server.context import ServerContext
from octavo.server.formats.events import (
    OutputEvent,
    ReasoningDelta,
    TextDelta,
    ToolCallBegin,
    ToolCallDelta,
    joined,
)
from octavo.server.generation import Generated
from octavo.server.logprobs import ChatLogprobs, PromptLogprobsField
from octavo.server.schema.chat import ChatCompletionRequest
from octavo.server.schema.chat_batch import ChatBatchRequest
from octavo.server.schema.tools import ToolCall
from octavo.server.sending import StreamEvent, packing
from octavo.server.turn import Turn
from octavo.server.usage import Usage

_OF_CALLS: Final = {False: ("function", "arguments"), True: ("custom", "input")}
"""By whether a tool is a custom one: the field of a call, and within it the field of the text that the model writes."""


class ChatMessage(Struct, kw_only=True):
    """What the model said. The reasoning has two names: clients know one or the other, and read it where there is
    none, too."""

    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatChoice(Struct, kw_only=True):
    """One of the responses of the model."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | UnsetType = UNSET
    weight_versions: list[WeightVersionSpan] | UnsetType = UNSET


class ChatCompletionResponse(Generated, kw_only=True):
    """Response of `POST /v1/chat/completions`."""

    object: Literal["chat.completion"] = "chat.completion"
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: PromptLogprobsField = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class ChatCompletion(Turn):
    """Return the next turn of a conversation, whole or as a stream.

    A stream has the role, the text in pieces, an empty delta with the finish reason, the usage. A chunk adds the role,
    or text, or reasoning, or a call, or nothing.
    """

    kind: ClassVar[type[ChatCompletionRequest]] = ChatCompletionRequest
    id_prefix = "chatcmpl-"
    chunk_object = "chat.completion.chunk"
    yields_aborted = True
    _has_begun = False

    def whole(self, outputs: Sequence[RequestOutput]) -> ChatCompletionResponse:
        [output] = outputs
        response = self._response(outputs)
        if self.asked.prompt_logprobs is not None:
            response.prompt_logprobs = output.prompt_logprobs or []
        if self.asked.return_token_ids:
            response.prompt_token_ids = output.prompt_token_ids
        return response

    def chunks(self, index: int, output: RequestOutput) -> Iterator[StreamEvent]:
        if not self._has_begun:
            self._has_begun = True
            yield from self._first_chunks(output)
        for completion in output.outputs:
            deltas = [delta for each in self.events(output, completion) if (delta := _delta(each)) is not None]
            logprobs = self.logprobs(completion)
            if not deltas and (logprobs or (self.asked.return_token_ids and completion.token_ids)):
                deltas = [{"content": ""}]
            of_tokens: dict[str, Any] = {"logprobs": logprobs}
            if self.asked.return_token_ids:
                of_tokens["token_ids"] = completion.token_ids
            for place, delta in enumerate(deltas):
                # fields of the tokens are sent once
                yield self._chunk(completion.index, delta, **({} if place else of_tokens))
            if completion.finish_reason is not None:
                reasons: dict[str, Any] = {"finish_reason": self.finish_reason(completion)}
                reasons["stop_reason"] = completion.stop_reason
                if (versions := self.weight_versions(completion)) is not UNSET:
                    reasons["weight_versions"] = versions
                yield self._chunk(completion.index, {}, **reasons)

    def _response(self, outputs: Sequence[RequestOutput]) -> ChatCompletionResponse:
        packed = packing(outputs)
        choices = [
            ChatChoice(
                index=completion.index,
                message=self._message(output, completion),
                logprobs=packed(self.logprobs(completion)),
                finish_reason=self.finish_reason(completion),
                stop_reason=completion.stop_reason,
                token_ids=self.token_ids(completion),
                weight_versions=self.weight_versions(completion),
            )
            for output in outputs
            for completion in output.outputs
        ]
        return ChatCompletionResponse(**self.frame, choices=choices, usage=self.usage())

    def _message(self, output: RequestOutput, completion: CompletionOutput) -> ChatMessage:
        read = joined(self.events(output, completion))
        return ChatMessage(
            content=self.echoed_text(completion.index) + (read.text or "") or (None if read.calls else ""),
            reasoning_content=read.reasoning,
            reasoning=read.reasoning,
            tool_calls=[*map(ToolCall.of, read.calls)] or UNSET,
        )

    def echoed_text(self, index: int) -> str:
        """Return the echoed text before the model's own text in choice `index`."""
        return self.asked.echoed_text

    def _first_chunks(self, output: RequestOutput) -> Iterator[StreamEvent]:
        """Yield the role of each choice. A beam search may find fewer than n, and returns all of them at once."""
        num_found = len(output.outputs) if self.params.use_beam_search else self.params.n
        for index in range(num_found):
            chunk = self._chunk(index, {"role": "assistant", "content": ""})
            if self.asked.wants_usage_always:
                # the role comes with the first output, but before its tokens
                chunk["usage"] = self.usage(without_completion=True)
            if self.asked.return_token_ids and index == 0:
                chunk["prompt_token_ids"] = output.prompt_token_ids
            yield chunk
            if echoed := self.asked.echoed_text:
                yield self._chunk(index, {"content": echoed})

    def _chunk(self, index: int, delta: dict[str, Any], **fields: Any) -> Any:
        return self.chunk([{"index": index, "delta": delta, "logprobs": None, "finish_reason": None, **fields}])


class ChatBatch(ChatCompletion):
    """Return one choice for each of several conversations, in their order."""

    kind = ChatBatchRequest

    def __init__(
        self, context: ServerContext, request: Request, asked: ChatBatchRequest, prompts: Sequence[Prompt]
    ) -> None:
        self._batch = asked
        super().__init__(context, request, asked.chat(0), prompts)

    def whole(self, outputs: Sequence[RequestOutput]) -> ChatCompletionResponse:
        for place, output in enumerate(outputs):
            for completion in output.outputs:
                completion.index = place
        return self._response(outputs)

    def echoed_text(self, index: int) -> str:
        return self._batch.chat(index).echoed_text if self.asked.echo else ""


def _delta(event: OutputEvent) -> dict[str, Any] | None:
    """Return what an event adds to a message; None for the end of a call."""
    match event:
        case TextDelta(text):
            return {"content": text}
        case ReasoningDelta(text):
            return {"reasoning_content": text, "reasoning": text}
        case ToolCallBegin(index, call_id, name, is_custom):
            kind, field = _OF_CALLS[is_custom]
            return {"tool_calls": [{"index": index, "id": call_id, "type": kind, kind: {"name": name, field: ""}}]}
        case ToolCallDelta(index, arguments, is_custom):
            kind, field = _OF_CALLS[is_custom]
            return {"tool_calls": [{"index": index, kind: {field: arguments}}]}
        case _:
            return None
