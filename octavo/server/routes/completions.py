"""`POST /v1/completions`: text that goes on from one or several prompts."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial

import msgspec
from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from octavo.core.outputs import CompletionOutput, RequestOutput
from octavo.core.prompt import Prompt
from octavo.engine.detokenizer import text_offsets
from octavo.server.context import ServerContext
from octavo.server.generation import Frame, Generation, TokenCounts, answer_in_one_piece, caller_for
from octavo.server.keys import Caller
from octavo.server.logprobs import Position, completion_logprobs, token_text
from octavo.server.responses import CompletionChoice, CompletionLogprobs, CompletionResponse, Usage
from octavo.server.schema import CompletionRequest
from octavo.server.streaming import DONE, EventStream, event


async def create(context: ServerContext, request: Request) -> Response | EventStream:
    """Return the continuation of one or several prompts, whole or as a stream."""
    asked, prompts = await context.texts.read(request, CompletionRequest)
    answer = _Answer(context, asked, prompts, Frame.of("cmpl", request, asked, context), caller_for(request, asked))
    if asked.stream:
        return EventStream(answer.events(), context.open_requests)
    async with context.open_requests.track(request.receive):
        return await answer.response()


@dataclass
class _Sent:
    """What of a choice has been sent: anything at all, and how many characters of an echoed prompt."""

    nothing: bool = True
    num_prompt_chars: int = 0


@dataclass
class _Answer:
    """One request on its way from the client's words to the answer's."""

    context: ServerContext
    asked: CompletionRequest
    prompts: list[Prompt]
    frame: Frame
    caller: Caller
    generation: Generation = field(init=False)

    def __post_init__(self) -> None:
        asked = self.asked
        others: dict[str, int | None] = {"logprobs": asked.logprobs}
        if asked.max_tokens is not None:
            # the engine always draws a token; an echo alone leaves it out of the answer
            others["max_tokens"] = 1 if self.echoes_only else asked.max_tokens
        if asked.echo and asked.logprobs is not None:
            others["prompt_logprobs"] = asked.logprobs
        self.generation = Generation(
            self.context,
            self.frame.id,
            self.prompts,
            self.context.llm.default_sampling_params(**asked.given_sampling(**others)),
            asked=asked,
            caller=self.caller,
            field_names={"prompt_token_ids": "prompt"},
        )

    @property
    def echoes_only(self) -> bool:
        return bool(self.asked.echo) and self.asked.max_tokens == 0

    async def response(self) -> Response:
        """The answer in one piece."""
        outputs = await self.generation.final_outputs()
        return await answer_in_one_piece(self.context, outputs, lambda: self._whole(outputs))

    def _whole(self, outputs: list[RequestOutput]) -> CompletionResponse:
        counts = TokenCounts(len(outputs), self.asked)
        choices = []
        for index, output in enumerate(outputs):
            counts.add(index, output)
            for completion in output.outputs:
                choice = self._choice(index, output, completion, _Sent())
                choice.finish_reason, choice.stop_reason = self._finish(completion)
                if self.asked.prompt_logprobs is not None:
                    choice.prompt_logprobs = output.prompt_logprobs or []
                choices.append(choice)
        usage = counts.usage(without_completion=self.echoes_only)
        return CompletionResponse(**self.frame.fields(), choices=choices, usage=usage)

    async def events(self) -> AsyncGenerator[bytes, None]:
        """The answer in pieces: text as it comes, for each choice an empty one with the finish reason, the usage."""
        encoder = msgspec.json.Encoder()
        counts = TokenCounts(len(self.generation.prompts), self.asked)
        sent: dict[int, _Sent] = {}

        def chunk(choice: CompletionChoice) -> bytes:
            usage: Usage | UnsetType | None = None if self.asked.wants_usage_chunk else UNSET
            if self.asked.wants_usage_always:
                usage = counts.usage(without_completion=self.echoes_only)
            return event(encoder, CompletionResponse(**self.frame.fields(), choices=[choice], usage=usage))

        async with aclosing(self.generation.outputs()) as outputs:
            async for index, output in outputs:
                counts.add(index, output)
                for completion in output.outputs:
                    key = self._choice_index(index, completion)
                    make = partial(self._choice, index, output, completion, sent.setdefault(key, _Sent()))
                    choice = await self.context.large_answers.build(make, len(output.prompt_logprobs or ()))
                    if choice.text or choice.logprobs or choice.token_ids or choice.prompt_token_ids:
                        yield chunk(choice)
                    if completion.finish_reason is not None:
                        reason, stop_reason = self._finish(completion)
                        yield chunk(CompletionChoice(index=key, text="", finish_reason=reason, stop_reason=stop_reason))
        if self.asked.wants_usage_chunk:
            usage = counts.usage(without_completion=self.echoes_only)
            yield event(encoder, CompletionResponse(**self.frame.fields(), choices=[], usage=usage))
        yield DONE

    def _choice_index(self, prompt_index: int, completion: CompletionOutput) -> int:
        return prompt_index * self.generation.params.n + completion.index

    def _finish(self, completion: CompletionOutput) -> tuple[str | None, int | str | None]:
        return ("length", None) if self.echoes_only else (completion.finish_reason, completion.stop_reason)

    def _choice(
        self, prompt_index: int, output: RequestOutput, completion: CompletionOutput, sent: _Sent
    ) -> CompletionChoice:
        """What `completion` holds, after the prompt if that is asked for and was not sent. Updates `sent`."""
        choice = CompletionChoice(index=self._choice_index(prompt_index, completion), text="")
        token_ids: list[int] = []
        positions: list[Position | None] = []
        offsets: list[int] = []
        is_first, sent.nothing = sent.nothing, False
        if self.asked.echo and is_first:
            choice.text = self._prompt_text(output)
            sent.num_prompt_chars = len(choice.text)
            token_ids += output.prompt_token_ids
            if output.prompt_logprobs is not None:
                positions += output.prompt_logprobs
                offsets += text_offsets(self.context.llm.tokenizer, token_ids, choice.text)
        if not self.echoes_only:
            choice.text += completion.text
            token_ids += completion.token_ids
            positions += completion.logprobs or []
            offsets += [sent.num_prompt_chars + offset for offset in completion.text_offsets or []]
        if self.asked.logprobs is not None and token_ids:
            choice.logprobs = self._logprobs(self.asked.logprobs, token_ids, positions, offsets)
        if self.asked.return_token_ids:
            choice.token_ids = [] if self.echoes_only else completion.token_ids
            if is_first:
                choice.prompt_token_ids = output.prompt_token_ids
        return choice

    def _logprobs(
        self, num_top: int, token_ids: list[int], positions: list[Position | None], offsets: list[int]
    ) -> CompletionLogprobs:
        texts = [token_text(*pair) for pair in zip(token_ids, positions, strict=True)]
        if positions[0] is None:
            # nothing comes before the first token of a prompt, so it has no entry that would hold its text
            texts[0] = self.context.llm.tokenizer.token_text(token_ids[0])
        return completion_logprobs(texts, token_ids, positions, num_top, offsets)

    def _prompt_text(self, output: RequestOutput) -> str:
        if output.prompt is not None:
            return output.prompt
        # an echo holds what was sent, special tokens too
        return self.context.llm.tokenizer.decode(output.prompt_token_ids, skip_special_tokens=False)
