"""`POST /v1/chat/completions`: the next turn of a conversation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from octavo.core.outputs import CompletionOutput, RequestOutput
from octavo.core.sampling_params import SamplingParams
from octavo.errors import InvalidRequest
from octavo.server.context import ServerContext
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

    def sampling_params(self) -> SamplingParams:
        asked, model = self.asked, self.context.llm.config.model
        if asked.tools and asked.tool_choice != "none":
            raise InvalidRequest("tools are not called yet", field="tools", code="unsupported_parameter")
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
            return self.context.llm.default_sampling_params(**asked.given_sampling(**limit, logprobs=logprobs))

    def whole(self, outputs: Sequence[RequestOutput]) -> ChatCompletionResponse:
        [output] = outputs
        choices = [
            ChatChoice(
                index=completion.index,
                message=ChatMessage(content=completion.text),
                logprobs=self._logprobs(completion),
                finish_reason=completion.finish_reason,
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
            logprobs = self._logprobs(completion)
            if completion.text or logprobs or (self.asked.return_token_ids and completion.token_ids):
                delta = Delta(content=completion.text)
                yield self._chunk(completion.index, delta, logprobs=logprobs, token_ids=self.token_ids(completion))
            if completion.finish_reason is not None:
                reasons = {"finish_reason": completion.finish_reason, "stop_reason": completion.stop_reason}
                yield self._chunk(completion.index, Delta(), **reasons)

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
