"""`POST /v1/chat/completions`: the next turn of a conversation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from octavo.core.outputs import CompletionOutput, RequestOutput
from octavo.core.sampling_params import SamplingParams
from octavo.errors import InvalidRequest
from octavo.server.context import ServerContext
from octavo.server.formats.events import (
    OutputEvent,
    ReasoningDelta,
    TextDelta,
    ToolCallBegin,
    ToolCallDelta,
    joined,
)
from octavo.server.formats.reading import OutputReader
from octavo.server.generation import Generation, named_by_the_client
from octavo.server.logprobs import chat_logprobs
from octavo.server.responses.chat import (
    ChatChoice,
    ChatChunkChoice,
    ChatCompletionChunk,
    ChatCompletionResponse,
    ChatLogprobs,
    ChatMessage,
    Delta,
    FunctionCall,
    ToolCall,
)
from octavo.server.schema.chat import ChatCompletionRequest
from octavo.server.sending import EventStream


async def create(context: ServerContext, request: Request) -> Response | EventStream:
    """Return the next turn of a conversation, whole or as a stream."""
    asked, prompts = await context.texts.read(request, ChatCompletionRequest)
    return await _ChatCompletion(context, request, asked, prompts).respond()


class _ChatCompletion(Generation):
    """A stream has the role, the text in pieces, an empty delta with the finish reason, the usage."""

    id_prefix = "chatcmpl"
    asked: ChatCompletionRequest
    _has_begun = False
    _reader: OutputReader | None = None

    def sampling_params(self) -> SamplingParams:
        asked, model = self.asked, self.context.llm.config.model
        if (asked.top_logprobs or 0) > model.max_logprobs:
            raise InvalidRequest(
                f"top_logprobs is {asked.top_logprobs}, must be at most {model.max_logprobs}", field="top_logprobs"
            )
        # a conversation goes on until the model ends its turn, unless the request or the checkpoint sets a limit
        is_left_to_checkpoint = asked.token_limit is None and model.generation_defaults.get("max_tokens") is not None
        limit = {} if is_left_to_checkpoint else {"max_tokens": asked.token_limit}
        self.field_names = {"prompt": "messages", "prompt_token_ids": "messages", "logprobs": "top_logprobs"}
        if asked.max_completion_tokens is not None:
            self.field_names["max_tokens"] = "max_completion_tokens"
        with named_by_the_client(self.field_names):
            logprobs = (asked.top_logprobs or 0) if asked.logprobs else None
            given = asked.given_sampling(**limit, logprobs=logprobs)
            return self.context.llm.default_sampling_params(**{**given, **self._reading_params()})

    def _reading_params(self) -> dict[str, Any]:
        """Return the sampling parameters with which the calls and the reasoning can be read."""
        model = self.context.texts.format
        self._reader = model.reader(self.asked)
        if self._reader is None:
            return {}
        [prompt] = self.prompts
        changes: dict[str, Any] = {"skip_special_tokens": False} if self._reader.shows_special else {}
        grammar = None if self.asked.form() else model.grammar(self.asked, is_open=model.ends_in_reasoning(prompt))
        return changes if grammar is None else {**changes, "structured_outputs": grammar}

    def whole(self, outputs: Sequence[RequestOutput]) -> ChatCompletionResponse:
        [output] = outputs
        choices = [
            ChatChoice(
                index=completion.index,
                message=self._message(output, completion),
                logprobs=self._logprobs(completion),
                finish_reason=self._finish_reason(completion),
                stop_reason=completion.stop_reason,
                token_ids=self.token_ids(completion),
            )
            for completion in output.outputs
        ]
        response = ChatCompletionResponse(**self.frame, choices=choices, usage=self.usage())
        if self.asked.prompt_logprobs is not None:
            response.prompt_logprobs = output.prompt_logprobs or []
        if self.asked.return_token_ids:
            response.prompt_token_ids = output.prompt_token_ids
        return response

    def chunks(self, index: int, output: RequestOutput) -> Iterator[ChatCompletionChunk]:
        if not self._has_begun:
            self._has_begun = True
            yield from self._first_chunks(output)
        for completion in output.outputs:
            deltas = self._deltas(output, completion)
            logprobs = self._logprobs(completion)
            if not deltas and (logprobs or (self.asked.return_token_ids and completion.token_ids)):
                deltas = [Delta(content="")]
            for place, delta in enumerate(deltas):
                # what belongs to the tokens comes once
                of_tokens = {} if place else {"logprobs": logprobs, "token_ids": self.token_ids(completion)}
                yield self._chunk(completion.index, delta, **of_tokens)
            if completion.finish_reason is not None:
                reasons = {"finish_reason": self._finish_reason(completion), "stop_reason": completion.stop_reason}
                yield self._chunk(completion.index, Delta(), **reasons)

    def _message(self, output: RequestOutput, completion: CompletionOutput) -> ChatMessage:
        if self._reader is None:
            return ChatMessage(content=completion.text)
        read = joined(self._reader.events(output, completion))
        reasoning: Any = UNSET if read.reasoning is None else read.reasoning
        calls = [
            ToolCall(id=call.id, type="function", function=FunctionCall(name=call.name, arguments=call.arguments))
            for call in read.calls
        ]
        return ChatMessage(
            content=read.text if read.text or calls else "",
            reasoning_content=reasoning,
            reasoning=reasoning,
            tool_calls=calls or UNSET,
        )

    def _deltas(self, output: RequestOutput, completion: CompletionOutput) -> list[Delta]:
        if self._reader is None:
            return [Delta(content=completion.text)] if completion.text else []
        events = self._reader.events(output, completion)
        return [delta for event in events if (delta := _delta(event)) is not None]

    def _finish_reason(self, completion: CompletionOutput) -> str | None:
        if (
            completion.finish_reason == "stop"
            and self._reader is not None
            and self._reader.has_called(completion.index)
        ):
            return "tool_calls"
        return completion.finish_reason

    def reasoning_tokens(self) -> int | None:
        return None if self._reader is None else self._reader.num_reasoning_tokens

    def _first_chunks(self, output: RequestOutput) -> Iterator[ChatCompletionChunk]:
        """Yield the role of each choice. A beam search may find fewer than n, and returns all of them at once."""
        num_found = len(output.outputs) if self.params.use_beam_search else self.params.n
        for index in range(num_found):
            chunk = self._chunk(index, Delta(role="assistant", content=""))
            if self.asked.wants_usage_always:
                # the role comes with the first output, but before its tokens
                chunk.usage = self.usage(without_completion=True)
            if self.asked.return_token_ids and index == 0:
                chunk.prompt_token_ids = output.prompt_token_ids
            yield chunk

    def _chunk(self, index: int, delta: Delta, **fields: Any) -> ChatCompletionChunk:
        choice = ChatChunkChoice(index=index, delta=delta, **fields)
        return ChatCompletionChunk(**self.frame, choices=[choice], usage=self.usage_of_chunk())

    def usage_chunk(self) -> ChatCompletionChunk:
        return ChatCompletionChunk(**self.frame, choices=[], usage=self.usage())

    def _logprobs(self, completion: CompletionOutput) -> ChatLogprobs | None:
        if not self.asked.logprobs or not completion.token_ids:
            return None
        return chat_logprobs(
            completion.token_ids,
            completion.logprobs or [],
            self.asked.top_logprobs or 0,
            self.context.llm.tokenizer.token_bytes,
        )


def _delta(event: OutputEvent) -> Delta | None:
    """Return what an event adds to a message; None for the end of a call."""
    match event:
        case TextDelta(text):
            return Delta(content=text)
        case ReasoningDelta(text):
            return Delta(reasoning_content=text, reasoning=text)
        case ToolCallBegin(index, call_id, name):
            function = FunctionCall(name=name, arguments="")
            return Delta(tool_calls=[ToolCall(index=index, id=call_id, type="function", function=function)])
        case ToolCallDelta(index, arguments):
            return Delta(tool_calls=[ToolCall(index=index, function=FunctionCall(arguments=arguments))])
        case _:
            return None
