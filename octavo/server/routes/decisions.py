"""`POST /v1/decisions`: how probable the answers to questions about an input are."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from msgspec import Struct
from starlette.requests import Request

from octavo.core.outputs import RequestOutput
from octavo.core.prompt import Prompt
from octavo.core.sampling_params import OutputKind, SamplingParams
from octavo.engine.text.tokenizer import Tokenizer
from octavo.errors import InvalidRequest
from octavo.server.context import ServerContext
from octavo.server.generation import EngineRequests
from octavo.server.routes.responses import InputTokensDetails, OutputTokensDetails, ResponseUsage
from octavo.server.schema.decisions import LABELS, Choice, DecisionRequest, Predicate, Scale

_NAMES: Final = dict.fromkeys(("prompt", "prompt_token_ids", "max_tokens"), "questions")
_TAIL: Final = 32
"""Characters at the end of a prompt that are read with a label behind them: the begin of the model's turn."""


class PredicateAnswer(Struct, tag_field="type", tag="predicate", kw_only=True):
    """The answer to a `Predicate`."""

    name: str | None
    probability: float


class ChoiceProbability(Struct):
    """The probability of an option."""

    value: str | bool
    probability: float


class ChoiceAnswer(Struct, tag_field="type", tag="choice", kw_only=True):
    """The answer to a `Choice`. confidence: the probability of the choice among all tokens, not the options alone."""

    name: str | None
    choice: str | bool
    probabilities: list[ChoiceProbability]
    confidence: float


class LevelProbability(Struct):
    """The probability of a level."""

    value: int
    label: str
    probability: float


class ScoreAnswer(Struct, tag_field="type", tag="score", kw_only=True):
    """The answer to a `Scale`. score: the mean of the levels. confidence: that of the likeliest, as of a choice."""

    name: str | None
    score: float
    probabilities: list[LevelProbability]
    confidence: float


Answer = PredicateAnswer | ChoiceAnswer | ScoreAnswer


class DecisionResponse(Struct, kw_only=True):
    """Response of `POST /v1/decisions`: answers in the order of the questions."""

    answers: list[Answer]
    model: str
    usage: ResponseUsage


async def decisions(context: ServerContext, request: Request) -> DecisionResponse:
    """Return how probable the answers to questions about an input are. Raises InvalidRequest or ApiError."""
    asked, prompts = await context.texts.read(request, DecisionRequest)
    requests = EngineRequests(context, request, asked, "decision-")
    most = max(len(each.options()) for each in asked.questions)
    labels = label_tokens(context.llm.tokenizer, prompts[0], most)
    params = SamplingParams(
        temperature=0.0,
        max_tokens=1,
        logprob_token_ids=tuple(labels),
        detokenize=False,
        output_kind=OutputKind.FINAL_ONLY,
    )
    async with context.open_requests.track(request.receive):
        found = await requests.last_outputs(prompts, params, _NAMES)
    return DecisionResponse(
        answers=[_answer(*each, labels) for each in zip(asked.questions, found, strict=True)],
        model=context.models.name(asked.model),
        usage=_usage(found),
    )


def label_tokens(tokenizer: Tokenizer, prompt: Prompt, count: int) -> list[int]:
    """Return the tokens of the first labels behind a prompt. Raises InvalidRequest where one is not one token."""
    text = prompt.text or tokenizer.decode((prompt.token_ids or ())[-_TAIL:], skip_special_tokens=False)
    tail = text[-_TAIL:]
    before = tokenizer.encode(tail, add_special_tokens=False)
    tokens = []
    for label in LABELS[:count]:
        *found, token = tokenizer.encode(tail + label, add_special_tokens=False)
        if found != before or token in tokens:
            raise InvalidRequest(
                f"the model's tokenizer has no token for {label} behind a prompt; ask by POST /v1/chat/completions",
                code="unsupported_task",
            )
        tokens.append(token)
    return tokens


def _answer(question: Predicate | Choice | Scale, output: RequestOutput, labels: Sequence[int]) -> Answer:
    [position] = output.outputs[0].logprobs or [{}]
    logprobs = [position[label].logprob for label in labels[: len(question.options())]]
    highest = max(logprobs)
    weights = [math.exp(each - highest) for each in logprobs]
    total = math.fsum(weights)
    probabilities = [each / total for each in weights]
    best, confidence = logprobs.index(highest), math.exp(highest)
    match question:
        case Predicate():
            return PredicateAnswer(name=question.name, probability=probabilities[0])
        case Choice():
            values = [one.value for one in question.choices]
            by_value = [ChoiceProbability(*pair) for pair in zip(values, probabilities, strict=True)]
            return ChoiceAnswer(name=question.name, choice=values[best], probabilities=by_value, confidence=confidence)
        case Scale():
            by_level = [
                LevelProbability(number, level.label, one)
                for number, (level, one) in enumerate(zip(question.levels, probabilities, strict=True))
            ]
            score = math.fsum(number * one for number, one in enumerate(probabilities))
            return ScoreAnswer(name=question.name, score=score, probabilities=by_level, confidence=confidence)


def _usage(outputs: Sequence[RequestOutput]) -> ResponseUsage:
    num_read = sum(len(each.prompt_token_ids) for each in outputs)
    num_cached = sum(each.num_cached_tokens for each in outputs)
    num_new = sum(each.num_generated_tokens for each in outputs)
    return ResponseUsage(num_read, InputTokensDetails(num_cached), num_new, OutputTokensDetails(0), num_read + num_new)
