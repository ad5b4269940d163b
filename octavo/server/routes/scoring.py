"""`POST /generative_scoring`: how probable some tokens are behind a query and each of several items."""

from __future__ import annotations

import math
from time import time
from typing import Final

from starlette.requests import Request

from octavo.core.outputs import RequestOutput
from octavo.core.sampling_params import OutputKind, SamplingParams
from octavo.server.context import ServerContext
from octavo.server.generation import EngineRequests
from octavo.server.schema.scoring import GenerativeScoringRequest
from octavo.server.schema.vectors import Score, ScoreList
from octavo.server.usage import TokenCounts

_OF_PROMPTS: Final = ("prompt", "prompt_token_ids", "max_tokens")
_NAMES: Final = {**dict.fromkeys(_OF_PROMPTS, "items"), "logprob_token_ids": "label_token_ids"}


async def generative_scoring(context: ServerContext, request: Request) -> ScoreList:
    """Return how probable it is that a token follows a query and an item. Raises InvalidRequest or ApiError."""
    asked, prompts = await context.texts.read(request, GenerativeScoringRequest)
    requests = EngineRequests(context, request, asked, "generative-scoring-")
    labels = tuple(dict.fromkeys(asked.label_token_ids))
    params = SamplingParams(
        temperature=0.0,
        max_tokens=1,
        logprob_token_ids=labels,
        detokenize=False,
        output_kind=OutputKind.FINAL_ONLY,
    )
    async with context.open_requests.track(request.receive):
        found = await requests.last_outputs(prompts, params, _NAMES)
    num_prompt = sum(len(each.prompt_token_ids) for each in found)
    num_new = sum(each.num_generated_tokens for each in found)
    return ScoreList(
        id=requests.id,
        created=int(time()),
        model=context.models.name(asked.model),
        data=[Score(index, _score(each, labels, asked.apply_softmax)) for index, each in enumerate(found)],
        usage=TokenCounts(num_prompt, num_new, num_prompt + num_new),
    )


def _score(output: RequestOutput, labels: tuple[int, ...], among_labels: bool) -> float:
    """Return the probability of the first label, among all tokens or the labels alone."""
    [position] = output.outputs[0].logprobs or [{}]
    logprobs = [position[label].logprob for label in labels]
    if not among_labels:
        return math.exp(logprobs[0])
    highest = max(logprobs)
    return math.exp(logprobs[0] - highest) / math.fsum(math.exp(each - highest) for each in logprobs)
