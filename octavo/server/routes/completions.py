"""`POST /v1/completions`: text that continues one or several prompts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal

from msgspec import UNSET, Struct, UnsetType

from octavo.core.outputs import CompletionOutput, RequestOutput, WeightVersionSpan
from octavo.core.sampling_params import SamplingParams
from octavo.engine.text.detokenizer import text_offsets
from octavo.engine.text.fill_in import ends_of_filling_in
from octavo.errors import named_by_the_caller
from octavo.server.generation import Generated, Generation
from octavo.server.logprobs import CompletionLogprobs, Position, PromptLogprobsField, completion_logprobs, token_text
from octavo.server.schema.completions import CompletionRequest
from octavo.server.sending import StreamEvent, packing
from octavo.server.usage import Usage


class CompletionChoice(Struct, kw_only=True):
    """One completion, or its new part in a chunk of a stream."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    prompt_logprobs: PromptLogprobsField = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET
    weight_versions: list[WeightVersionSpan] | UnsetType = UNSET


class CompletionResponse(Generated, kw_only=True):
    """Response of `POST /v1/completions`; a chunk of its stream is one, too, whose usage may be absent or null."""

    object: Literal["text_completion"] = "text_completion"
    choices: list[CompletionChoice]
    usage: Usage


class Completion(Generation):
    """Return the continuation of one or several prompts, whole or as a stream.

    A stream has the text in pieces, an empty one of each choice with the finish reason, the usage.
    """

    kind = CompletionRequest
    id_prefix = "cmpl-"
    chunk_object = "text_completion"
    yields_aborted = True
    asked: CompletionRequest

    def sampling_params(self) -> SamplingParams:
        asked = self.asked
        self.field_names = {"prompt_token_ids": "prompt", **asked.form_names}
        self._num_prompt_chars: dict[int, int] = {}
        """For each choice of which a part was sent: number of characters of the echoed prompt."""
        others: dict[str, Any] = {"logprobs": asked.logprobs}
        if asked.suffix:
            ends = ends_of_filling_in(self.context.llm.tokenizer)
            others["stop_token_ids"] = [*(asked.given_sampling().get("stop_token_ids") or ()), *ends]
        if asked.max_tokens is not None:
            # the engine always draws a token; an echo alone leaves it out of the response
            others["max_tokens"] = 1 if self.echoes_only else asked.max_tokens
        if asked.echo and asked.logprobs is not None:
            others["prompt_logprobs"] = asked.logprobs
        with named_by_the_caller(self.field_names):
            return self.context.llm.default_sampling_params(**asked.given_sampling(**others))

    @property
    def echoes_only(self) -> bool:
        return bool(self.asked.echo) and self.asked.max_tokens == 0

    def usage(self, *, without_completion: bool = False) -> Usage:
        return super().usage(without_completion=self.echoes_only)

    def whole(self, outputs: Sequence[RequestOutput]) -> CompletionResponse:
        choices, packed = [], packing(outputs)
        for index, output in enumerate(outputs):
            for completion in output.outputs:
                choice = self._choice(index, output, completion)
                choice.logprobs = packed(choice.logprobs)
                choice.finish_reason, choice.stop_reason = self._finish(completion)
                choice.weight_versions = self.weight_versions(completion)
                if self.asked.prompt_logprobs is not None:
                    choice.prompt_logprobs = output.prompt_logprobs or []
                choices.append(choice)
        return CompletionResponse(**self.frame, choices=choices, usage=self.usage())

    def chunks(self, index: int, output: RequestOutput) -> Iterator[StreamEvent]:
        for completion in output.outputs:
            choice = self._choice(index, output, completion)
            if choice.text or choice.logprobs or choice.token_ids or choice.prompt_token_ids:
                yield self.chunk([choice])
            if completion.finish_reason is not None:
                reason, stop_reason = self._finish(completion)
                last = CompletionChoice(index=choice.index, text="", finish_reason=reason, stop_reason=stop_reason)
                last.weight_versions = self.weight_versions(completion)
                yield self.chunk([last])

    def _finish(self, completion: CompletionOutput) -> tuple[str | None, int | str | None]:
        return ("length", None) if self.echoes_only else (completion.finish_reason, completion.stop_reason)

    def _choice(self, prompt_index: int, output: RequestOutput, completion: CompletionOutput) -> CompletionChoice:
        """Return a choice with its new text, after the prompt if that is echoed and was not sent yet."""
        choice = CompletionChoice(index=prompt_index * self.params.n + completion.index, text="")
        is_first = choice.index not in self._num_prompt_chars
        echoed = output.prompt if self.asked.echo and is_first else None
        if self.asked.echo and is_first and echoed is None:
            # an echo holds what was sent, special tokens too
            echoed = self.context.llm.tokenizer.decode(output.prompt_token_ids, skip_special_tokens=False)
        if is_first:
            choice.text = echoed or ""
            self._num_prompt_chars[choice.index] = len(choice.text)
        new = None if self.echoes_only else completion
        choice.logprobs = self._logprobs(output, echoed, new, self._num_prompt_chars[choice.index])
        if not self.echoes_only:
            choice.text += completion.text
        if self.asked.return_token_ids:
            choice.token_ids = [] if self.echoes_only else completion.token_ids
            if is_first:
                choice.prompt_token_ids = output.prompt_token_ids
        return choice

    def _logprobs(
        self, output: RequestOutput, echoed: str | None, completion: CompletionOutput | None, num_prompt_chars: int
    ) -> CompletionLogprobs | None:
        """Return the log-probabilities of the echoed prompt and the new tokens of a completion; None without tokens,
        and if none were requested."""
        if self.asked.logprobs is None:
            return None
        token_ids: list[int] = []
        positions: list[Position | None] = []
        offsets: list[int] = []
        if echoed is not None:
            token_ids += output.prompt_token_ids
            if output.prompt_logprobs is not None:
                positions += output.prompt_logprobs
                offsets += text_offsets(self.context.llm.tokenizer, token_ids, echoed)
        if completion is not None:
            token_ids += completion.token_ids
            positions += completion.logprobs or []
            offsets += [num_prompt_chars + offset for offset in completion.text_offsets or []]
        if not token_ids:
            return None
        positions = [*self.shown(positions)]
        texts = [token_text(*pair) for pair in zip(token_ids, positions, strict=True)]
        if positions[0] is None and not self.shows_ids:
            # the first token of a prompt has no predecessor, and so no entry that would hold its text
            texts[0] = self.context.llm.tokenizer.token_text(token_ids[0])
        num_top = -1 if self.asked.logprob_token_ids else self.asked.logprobs
        return completion_logprobs(texts, token_ids, positions, num_top, offsets)
