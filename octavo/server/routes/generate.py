"""`POST /inference/v1/generate`: token ids that continue token ids, as vLLM's servers for tokens alone have it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal

from msgspec import UNSET, Struct, UnsetType
from starlette.requests import Request

from octavo.core.outputs import CompletionOutput, RequestOutput, WeightVersionSpan
from octavo.core.prompt import Prompt
from octavo.core.sampling_params import SamplingParams
from octavo.errors import named_by_the_caller
from octavo.server.context import ServerContext
from octavo.server.generation import Generation
from octavo.server.logprobs import Position, PromptLogprobsField
from octavo.server.schema.completions import CompletionRequest
from octavo.server.schema.generate import GenerateRequest
from octavo.server.usage import Usage


class TokenIdLogprob(Struct, frozen=True, gc=False):
    """The log-probability of a token; `rank` is 1 for the likeliest. token: the id as `token_id:7`, as trainers read it
    in answers of vLLM before 0.32."""

    token: str
    token_id: int
    logprob: float
    rank: int | None


class DrawnLogprob(TokenIdLogprob, frozen=True, gc=False):
    """A drawn token, and all tokens listed at its position, the drawn one first."""

    top_logprobs: list[TokenIdLogprob]


class GeneratedLogprobs(Struct, frozen=True):
    """Log-probabilities of a sequence: DrawnLogprob for each token, with text those of a chat."""

    content: list[Any]


class GeneratedChoice(Struct, kw_only=True):
    """One sequence, or its new part. weight_versions: those of all its tokens, sent with its end."""

    index: int
    text: str | UnsetType = UNSET
    token_ids: list[int]
    logprobs: GeneratedLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    weight_versions: list[WeightVersionSpan] | None = None


class GenerateResponse(Struct, kw_only=True):
    """Response of `POST /inference/v1/generate`, and each chunk of its stream."""

    request_id: str
    model: str
    created: int
    output_mode: Literal["tokens", "text"]
    choices: list[GeneratedChoice]
    usage: Usage | UnsetType | None = UNSET
    prompt_logprobs: PromptLogprobsField | None = None
    prompt_token_ids: list[int] | None = None


class Generate(Generation):
    """Return the token ids that continue token ids, whole or as a stream."""

    kind = GenerateRequest  # type: ignore[assignment]  # it becomes a completion
    id_prefix = "generate-tokens-"
    yields_aborted = True
    asked: CompletionRequest

    def __init__(
        self, context: ServerContext, request: Request, asked: GenerateRequest, prompts: Sequence[Prompt]
    ) -> None:
        self._given = asked
        self._shows_prompt = bool(asked.return_token_ids)
        super().__init__(context, request, asked.as_completion(), prompts)

    def sampling_params(self) -> SamplingParams:
        asked = self.asked
        self.field_names = self._given.names
        others: dict[str, Any] = {"logprobs": asked.logprobs, "max_tokens": asked.max_tokens}
        with named_by_the_caller(self.field_names):
            return self.context.llm.default_sampling_params(**asked.given_sampling(**others))

    def whole(self, outputs: Sequence[RequestOutput]) -> GenerateResponse:
        [output] = outputs
        response = self.chunk([self._choice(each) for each in output.outputs])
        response.usage = self.usage()
        if self.asked.prompt_logprobs is not None:
            response.prompt_logprobs = output.prompt_logprobs or []
        response.prompt_token_ids = output.prompt_token_ids if self._shows_prompt else None
        return response

    def chunks(self, index: int, output: RequestOutput) -> Iterator[GenerateResponse]:
        for completion in output.outputs:
            if completion.token_ids or completion.text or completion.finish_reason is not None:
                chunk = self.chunk([self._choice(completion)])
                if self._shows_prompt:
                    chunk.prompt_token_ids, self._shows_prompt = output.prompt_token_ids, False
                yield chunk

    def chunk(self, choices: list[Any]) -> GenerateResponse:
        frame = {name: self.frame[name] for name in ("model", "created")}
        usage = self.usage() if self.asked.wants_usage_always or not choices else UNSET
        mode = self._given.output_mode
        return GenerateResponse(request_id=self.id, output_mode=mode, choices=choices, usage=usage, **frame)

    def _choice(self, completion: CompletionOutput) -> GeneratedChoice:
        has_text = self._given.output_mode == "text"
        return GeneratedChoice(
            index=completion.index,
            text=completion.text if has_text else UNSET,
            token_ids=completion.token_ids,
            logprobs=self._logprobs(completion, has_text=has_text),
            finish_reason=completion.finish_reason,
            stop_reason=completion.stop_reason,
            weight_versions=completion.weight_versions,
        )

    def _logprobs(self, completion: CompletionOutput, *, has_text: bool) -> GeneratedLogprobs | None:
        positions = completion.logprobs
        if self.asked.logprobs is None or positions is None:
            return None
        if has_text:
            return GeneratedLogprobs([*self.described(completion, self.asked.logprobs).content])
        return GeneratedLogprobs([_drawn(*pair) for pair in zip(completion.token_ids, positions, strict=True)])


def _drawn(token_id: int, position: Position) -> DrawnLogprob:
    """Return a drawn token and the tokens listed at its position: the drawn one first, then the others, the likeliest
    first."""
    listed = [TokenIdLogprob(f"token_id:{each}", each, found.logprob, found.rank) for each, found in position.items()]
    listed.sort(key=lambda each: (each.token_id != token_id, -each.logprob))
    first = listed[0]
    return DrawnLogprob(first.token, first.token_id, first.logprob, first.rank, listed)
