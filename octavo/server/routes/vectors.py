"""`POST /v1/embeddings`, `/v2/embed`, `/rerank`, `/score`, `/classify` and `/pooling`: vectors and scores of texts."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from time import time
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from octavo.core.outputs import RequestOutput
from octavo.core.pooling import TOKEN_EMBED, array_of, cosine, values_of
from octavo.server.context import ServerContext
from octavo.server.generation import EngineRequests
from octavo.server.responses.vectors import (
    Classification,
    ClassificationList,
    CohereEmbeddings,
    Embedding,
    EmbeddingList,
    Pooled,
    PooledList,
    Ranked,
    RankedDocument,
    Reranked,
    Score,
    ScoreList,
    VectorUsage,
)
from octavo.server.schema.vectors import (
    ClassifyRequest,
    CohereEmbedRequest,
    EmbeddingRequest,
    PoolingRequest,
    RerankRequest,
    ScoreRequest,
    VectorRequest,
)
from octavo.server.sending import encode

T = TypeVar("T", bound=VectorRequest)


@dataclass(frozen=True)
class _Done:
    """The outputs of a request's prompts, and what responses begin with."""

    id: str
    model: str
    outputs: Sequence[RequestOutput]

    @property
    def usage(self) -> VectorUsage:
        num_tokens = sum(len(output.prompt_token_ids) for output in self.outputs)
        return VectorUsage(num_tokens, num_tokens)

    @property
    def frame(self) -> dict[str, Any]:
        """What all lists have."""
        return {"id": self.id, "created": int(time()), "model": self.model, "usage": self.usage}

    @property
    def meta(self) -> dict[str, Any]:
        """Cohere's counts."""
        return {"api_version": {"version": "2"}, "billed_units": {"input_tokens": self.usage.prompt_tokens}}

    def scores(self, num_queries: int, num_documents: int) -> list[float]:
        """Return the score of each pair: what the model made of it, or the cosine of both vectors."""
        values = [values_of(output.pooled) for output in self.outputs]
        if all(len(each) == 1 for each in values):
            return [score for (score,) in values]
        queries, documents = values[:num_queries], values[num_queries:]
        return [cosine(queries[min(n, num_queries - 1)], document) for n, document in enumerate(documents)]


async def embeddings(context: ServerContext, request: Request) -> Response:
    """Return the vectors of one input or several."""
    return await _respond(context, request, EmbeddingRequest, _embeddings)


async def cohere(context: ServerContext, request: Request) -> Response:
    """Return the vectors of texts, in Cohere's words."""
    return await _respond(context, request, CohereEmbedRequest, _cohere)


async def pooling(context: ServerContext, request: Request) -> Response:
    """Return what the model makes of one input or several."""
    return await _respond(context, request, PoolingRequest, _pooled)


async def classify(context: ServerContext, request: Request) -> Response:
    """Return the scores of the model's labels for one input or several."""
    return await _respond(context, request, ClassifyRequest, partial(_classified, context))


async def score(context: ServerContext, request: Request) -> Response:
    """Return how well pairs of texts go together."""
    return await _respond(context, request, ScoreRequest, _scored)


async def rerank(context: ServerContext, request: Request) -> Response:
    """Return documents in the order in which they go with a query, the best first."""
    has_documents = not request.url.path.endswith("/v2/rerank")
    return await _respond(context, request, RerankRequest, partial(_ranked, has_documents=has_documents))


async def _respond(
    context: ServerContext, request: Request, kind: type[T], make: Callable[[T, _Done], msgspec.Struct]
) -> Response:
    asked, prompts = await context.texts.read(request, kind)
    requests = EngineRequests(context, request, asked, asked.id_prefix)
    names = {"prompt": asked.texts_field, "prompt_token_ids": asked.texts_field}
    last: dict[int, RequestOutput] = {}
    async with context.open_requests.track(request.receive):
        outputs = requests.outputs(prompts, asked.params(), await requests.adapter(), names)
        async with aclosing(outputs):
            async for index, output in outputs:
                if requests.meter is not None:
                    requests.meter.spend(len(output.prompt_token_ids))
                last[index] = output
        done = _Done(requests.id, context.models.name(asked.model), [last[index] for index in range(len(prompts))])
        body = await context.large_answers.build(lambda: encode(make(asked, done)))
    return Response(body, media_type="application/json")


def _vector(output: RequestOutput, encoding: str | None) -> list[float] | str:
    return b64encode(output.pooled or b"").decode() if encoding == "base64" else values_of(output.pooled)


def _embeddings(asked: EmbeddingRequest, done: _Done) -> EmbeddingList:
    data = [Embedding(n, _vector(output, asked.encoding_format)) for n, output in enumerate(done.outputs)]
    return EmbeddingList(**done.frame, data=data)


def _pooled(asked: PoolingRequest, done: _Done) -> PooledList:
    def values(output: RequestOutput) -> Any:
        if asked.task == TOKEN_EMBED and asked.encoding_format != "base64":
            return array_of(output, TOKEN_EMBED).tolist()
        return _vector(output, asked.encoding_format)

    return PooledList(**done.frame, data=[Pooled(n, values(output)) for n, output in enumerate(done.outputs)])


def _cohere(asked: CohereEmbedRequest, done: _Done) -> CohereEmbeddings:
    found: dict[str, Any] = {
        kind: [_vector(output, kind) for output in done.outputs] for kind in asked.embedding_types or ["float"]
    }
    return CohereEmbeddings(id=done.id, embeddings=found, texts=asked.texts, meta=done.meta)


def _classified(context: ServerContext, asked: ClassifyRequest, done: _Done) -> ClassificationList:
    labels = context.llm.input.vectors.checked(asked.task).labels
    data = []
    for index, output in enumerate(done.outputs):
        probs = values_of(output.pooled)
        label = labels[max(range(len(probs)), key=probs.__getitem__)]
        data.append(Classification(index, label, probs, len(probs)))
    return ClassificationList(**done.frame, data=data)


def _scored(asked: ScoreRequest, done: _Done) -> ScoreList:
    queries, documents = asked.sides()
    scores = done.scores(len(queries), len(documents))
    return ScoreList(**done.frame, data=[Score(index, score) for index, score in enumerate(scores)])


def _ranked(asked: RerankRequest, done: _Done, *, has_documents: bool) -> Reranked:
    documents = asked.listed
    scores = done.scores(1, len(documents))
    shows = has_documents if asked.return_documents is None else asked.return_documents
    order = sorted(range(len(scores)), key=lambda index: -scores[index])[: asked.top_n]
    results = [
        Ranked(index, scores[index], RankedDocument(documents[index]) if shows else msgspec.UNSET) for index in order
    ]
    return Reranked(id=done.id, model=done.model, results=results, usage=done.usage, meta=done.meta)
