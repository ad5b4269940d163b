"""`POST /v1/chat/completions`: the next turn of a conversation."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field

import msgspec
from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from octavo.core.outputs import CompletionOutput, RequestOutput
from octavo.core.prompt import Prompt
from octavo.errors import InvalidRequest
from octavo.server.context import ServerContext
from octavo.server.generation import (
    Frame,
    Generation,
    TokenCounts,
    answer_in_one_piece,
    caller_for,
    named_by_the_client,
)
from octavo.server.keys import Caller
from octavo.server.logprobs import chat_logprobs
from octavo.server.responses import (
    ChatChoice,
    ChatChunkChoice,
    ChatCompletionChunk,
    ChatCompletionResponse,
    ChatLogprobs,
    ChatMessage,
    Delta,
    Usage,
)
from octavo.server.schema import ChatCompletionRequest
from octavo.server.streaming import DONE, EventStream, event


async def create(context: ServerContext, request: Request) -> Response | EventStream:
    """Return the next turn of a conversation, whole or as a stream."""
    asked, [prompt] = await context.texts.read(request, ChatCompletionRequest)
    answer = _Answer(context, asked, prompt, Frame.of("chatcmpl", request, asked, context), caller_for(request, asked))
    if asked.stream:
        return EventStream(answer.events(), context.open_requests)
    async with context.open_requests.track(request.receive):
        return await answer.response()


@dataclass
class _Answer:
    """One request on its way from the client's words to the answer's."""

    context: ServerContext
    asked: ChatCompletionRequest
    prompt: Prompt
    frame: Frame
    caller: Caller
    generation: Generation = field(init=False)

    def __post_init__(self) -> None:
        asked, model = self.asked, self.context.llm.config.model
        if (asked.top_logprobs or 0) > model.max_logprobs:
            raise InvalidRequest(
                f"top_logprobs is {asked.top_logprobs}, must be at most {model.max_logprobs}", field="top_logprobs"
            )
        # a conversation goes on until the model ends its turn, unless the request or the checkpoint sets a limit
        is_left_to_checkpoint = asked.token_limit is None and model.generation_defaults.get("max_tokens") is not None
        limit = {} if is_left_to_checkpoint else {"max_tokens": asked.token_limit}
        field_names = {"prompt": "messages", "prompt_token_ids": "messages", "logprobs": "top_logprobs"}
        if asked.max_completion_tokens is not None:
            field_names["max_tokens"] = "max_completion_tokens"
        with named_by_the_client(field_names):
            logprobs = (asked.top_logprobs or 0) if asked.logprobs else None
            params = self.context.llm.default_sampling_params(**asked.given_sampling(**limit, logprobs=logprobs))
        self.generation = Generation(
            self.context,
            self.frame.id,
            [self.prompt],
            params,
            asked=asked,
            caller=self.caller,
            field_names=field_names,
        )

    async def response(self) -> Response:
        """The answer in one piece."""
        (output,) = await self.generation.final_outputs()
        return await answer_in_one_piece(self.context, [output], lambda: self._whole(output))

    def _whole(self, output: RequestOutput) -> ChatCompletionResponse:
        counts = TokenCounts(1, self.asked)
        counts.add(0, output)
        choices = [
            ChatChoice(
                index=completion.index,
                message=ChatMessage(content=completion.text),
                logprobs=self._logprobs(completion),
                finish_reason=completion.finish_reason,
                stop_reason=completion.stop_reason,
                token_ids=self._token_ids(completion),
            )
            for completion in output.outputs
        ]
        answer = ChatCompletionResponse(**self.frame.fields(), choices=choices, usage=counts.usage())
        if self.asked.prompt_logprobs is not None:
            answer.prompt_logprobs = output.prompt_logprobs or []
        if self.asked.return_token_ids:
            answer.prompt_token_ids = output.prompt_token_ids
        return answer

    async def events(self) -> AsyncGenerator[bytes, None]:
        """The answer in pieces: the role, text as it comes, an empty delta with the finish reason, the usage."""
        encoder = msgspec.json.Encoder()
        counts = TokenCounts(1, self.asked)
        is_first = True

        def chunk(choice: ChatChunkChoice, prompt_token_ids: list[int] | UnsetType = UNSET) -> bytes:
            usage: Usage | UnsetType | None = None if self.asked.wants_usage_chunk else UNSET
            if self.asked.wants_usage_always:
                # the role comes with the first output, but before its tokens
                usage = counts.usage(without_completion=choice.delta.role is not UNSET)
            return event(
                encoder,
                ChatCompletionChunk(
                    **self.frame.fields(), choices=[choice], usage=usage, prompt_token_ids=prompt_token_ids
                ),
            )

        async with aclosing(self.generation.outputs()) as outputs:
            async for _, output in outputs:
                counts.add(0, output)
                if is_first:
                    is_first = False
                    params = self.generation.params
                    # a search may find fewer than n, and tells all of them at once
                    num_found = len(output.outputs) if params.use_beam_search else params.n
                    for index in range(num_found):
                        yield chunk(
                            ChatChunkChoice(index=index, delta=Delta(role="assistant", content="")),
                            output.prompt_token_ids if self.asked.return_token_ids and index == 0 else UNSET,
                        )
                for completion in output.outputs:
                    logprobs = self._logprobs(completion)
                    if completion.text or logprobs or (self.asked.return_token_ids and completion.token_ids):
                        yield chunk(
                            ChatChunkChoice(
                                index=completion.index,
                                delta=Delta(content=completion.text),
                                logprobs=logprobs,
                                token_ids=self._token_ids(completion),
                            )
                        )
                    if completion.finish_reason is not None:
                        yield chunk(
                            ChatChunkChoice(
                                index=completion.index,
                                delta=Delta(),
                                finish_reason=completion.finish_reason,
                                stop_reason=completion.stop_reason,
                            )
                        )
        if self.asked.wants_usage_chunk:
            yield event(encoder, ChatCompletionChunk(**self.frame.fields(), choices=[], usage=counts.usage()))
        yield DONE

    def _logprobs(self, completion: CompletionOutput) -> ChatLogprobs | None:
        if not self.asked.logprobs or not completion.token_ids:
            return None
        return chat_logprobs(
            completion.token_ids,
            completion.logprobs or [],
            self.asked.top_logprobs or 0,
            self.context.llm.tokenizer.token_bytes,
        )

    def _token_ids(self, completion: CompletionOutput) -> list[int] | UnsetType:
        return completion.token_ids if self.asked.return_token_ids else UNSET
