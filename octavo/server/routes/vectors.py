"""`POST /v1/embeddings`, `/v2/embed`, `/rerank`, `/score`, `/classify` and `/pooling`: vectors and scores of texts."""

from __future__ import annotations

import functools
import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from time import time
from typing import TYPE_CHECKING, Any, TypeVar

from msgspec import UNSET, Raw, Struct, UnsetType, to_builtins
from starlette.requests import Request
from starlette.responses import Response

from octavo.config.pooling.pooling_config import PoolingConfig
from octavo.core.outputs import RequestOutput
from octavo.core.pooling import CLASSIFY, values_of
from octavo.engine.input.listwise import list_scores
from octavo.engine.input.vector_input import VectorInput
from octavo.engine.output.vector_output import array_of
from octavo.server.context import ServerContext
from octavo.server.generation import EngineRequests
from octavo.server.schema.pairs import Document, RerankRequest, ScoreRequest
from octavo.server.schema.vectors import (
    BINARY,
    ClassifyRequest,
    CohereEmbedRequest,
    EmbeddingRequest,
    Encoding,
    PoolingRequest,
    Score,
    ScoreList,
    VectorList,
    VectorRequest,
)
from octavo.server.sending import encode
from octavo.server.usage import TokenCounts

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

T = TypeVar("T", bound=VectorRequest)
Handler = Callable[[ServerContext, Request], Awaitable[Response]]


class Embedding(Struct, frozen=True):
    """The vector of an input: numbers, or the base64 text of little-endian float32."""

    index: int
    embedding: Raw | str
    object: str = "embedding"


class Pooled(Struct, frozen=True):
    """What the model made of an input: numbers, rows of them for its tokens, or base64 text."""

    index: int
    data: Raw | str
    object: str = "pooling"


class Classification(Struct, frozen=True):
    """The scores of the labels for an input; `label` is the likeliest."""

    index: int
    label: str
    probs: list[float]
    num_classes: int


class EmbeddingList(VectorList, kw_only=True):
    """The response of `POST /v1/embeddings`."""

    data: list[Embedding]


class PooledList(VectorList, kw_only=True):
    """The response of `POST /pooling`."""

    data: list[Pooled]


class ClassificationList(VectorList, kw_only=True):
    """The response of `POST /classify`."""

    data: list[Classification]


class Ranked(Struct, frozen=True):
    """A document by its index in the request."""

    index: int
    relevance_score: float
    document: Document | UnsetType = UNSET


class Reranked(Struct, kw_only=True):
    """The response of `POST /rerank`: the best document first."""

    id: str
    model: str
    results: list[Ranked]
    usage: TokenCounts
    meta: dict[str, Any]


class CohereEmbeddings(Struct, kw_only=True):
    """The response of `POST /v2/embed`: the vectors by the types that were asked for."""

    id: str
    embeddings: dict[str, list[Raw | str]]
    texts: list[str]
    meta: dict[str, Any]
    response_type: str = "embeddings_by_type"


@dataclass(frozen=True)
class _Done:
    """The outputs of a request's prompts, and the common fields of responses. input: the model's input processor."""

    id: str
    path: str
    model: str
    input: VectorInput
    outputs: Sequence[RequestOutput]

    @property
    def config(self) -> PoolingConfig:
        return self.input.checked(None)

    @property
    def usage(self) -> TokenCounts:
        num_tokens = sum(len(output.prompt_token_ids) for output in self.outputs)
        return TokenCounts(num_tokens, 0, num_tokens)

    @property
    def frame(self) -> dict[str, Any]:
        return {"id": self.id, "created": int(time()), "model": self.model, "usage": self.usage}

    @property
    def meta(self) -> dict[str, Any]:
        return {"api_version": {"version": "2"}, "billed_units": {"input_tokens": self.usage.prompt_tokens}}

    def arrays(self, task: str | None = None) -> list[NDArray[np.float32]]:
        """Return the values of each prompt, of the requested task or else of the model's default one."""
        return [array_of(self.config, output, task or self.config.task) for output in self.outputs]

    def vectors(self, encoding: Encoding, task: str | None = None) -> list[Raw | str]:
        """Return the values of each prompt in the form for JSON."""
        return [encoding.value(each) for each in self.arrays(task)]

    def binary(self, asked: VectorRequest) -> Response:
        encoding = asked.encoding()
        content, data = encoding.joined(self.arrays(asked.params().task))
        metadata = to_builtins({**self.frame, "data": data})
        # escaped: the name of a model may have letters beyond Latin-1, a header may not
        headers = {"metadata": json.dumps(metadata)} if encoding.format == "bytes" else None
        return Response(content, media_type="application/octet-stream", headers=headers)

    def scores(self, num_queries: int) -> list[float]:
        """Return the score of each pair: the model's own score, or one computed from the vectors of both. One prompt
        may have several pairs."""
        if self.config.task == CLASSIFY:
            return [values_of(output.pooled)[0] for output in self.outputs]
        arrays = self.arrays()
        if self.input.ranks_lists:
            return [score for rows in arrays for score in list_scores(rows)]
        return [
            self.input.match(arrays[min(n, num_queries - 1)], arrays[num_queries + n], document.prompt_token_ids)
            for n, document in enumerate(self.outputs[num_queries:])
        ]


def _endpoint(kind: type[T]) -> Callable[[Callable[[T, _Done], Struct]], Handler]:
    """Make the handler of an endpoint, whose requests are of this kind, from the function that makes its response."""

    def decorate(make: Callable[[T, _Done], Struct]) -> Handler:
        @functools.wraps(make)
        async def respond(context: ServerContext, request: Request) -> Response:
            asked, prompts = await context.texts.read(request, kind)
            requests = EngineRequests(context, request, asked, asked.id_prefix)
            names = {"prompt": asked.texts_field, "prompt_token_ids": asked.texts_field, **asked.names}
            async with context.open_requests.track(request.receive):
                found = await requests.last_outputs(prompts, asked.params(), names)
                model, vectors = context.models.name(asked.model), context.llm.input.vectors
                done = _Done(requests.id, request.url.path, model, vectors, found)
                if asked.encoding().format in BINARY:
                    return await context.large_responses.build(functools.partial(done.binary, asked))
                body = await context.large_responses.build(lambda: encode(make(asked, done)))
            return Response(body, media_type="application/json")

        return respond

    return decorate


@_endpoint(EmbeddingRequest)
def embeddings(asked: EmbeddingRequest, done: _Done) -> EmbeddingList:
    """Return the vectors of one input or several."""
    data = [Embedding(index, vector) for index, vector in enumerate(done.vectors(asked.encoding()))]
    return EmbeddingList(**done.frame, data=data)


@_endpoint(CohereEmbedRequest)
def cohere(asked: CohereEmbedRequest, done: _Done) -> CohereEmbeddings:
    """Return the vectors of texts, in Cohere's words."""
    found = {str(kind): done.vectors(Encoding(format=kind)) for kind in asked.embedding_types or ["float"]}
    return CohereEmbeddings(id=done.id, embeddings=found, texts=asked.texts, meta=done.meta)


@_endpoint(PoolingRequest)
def pooling(asked: PoolingRequest, done: _Done) -> PooledList:
    """Return what the model makes of one input or several."""
    values = done.vectors(asked.encoding(), asked.params().task)
    return PooledList(**done.frame, data=[Pooled(index, each) for index, each in enumerate(values)])


@_endpoint(ClassifyRequest)
def classify(asked: ClassifyRequest, done: _Done) -> ClassificationList:
    """Return the scores of the model's labels for one input or several."""
    data = []
    for index, output in enumerate(done.outputs):
        probs = values_of(output.pooled)
        label = done.config.labels[max(range(len(probs)), key=probs.__getitem__)]
        data.append(Classification(index, label, probs, len(probs)))
    return ClassificationList(**done.frame, data=data)


@_endpoint(ScoreRequest)
def score(asked: ScoreRequest, done: _Done) -> ScoreList:
    """Return how well pairs of texts go together."""
    queries, _ = asked.sides()
    data = [Score(index, score) for index, score in enumerate(done.scores(len(queries)))]
    return ScoreList(**done.frame, data=data)


@_endpoint(RerankRequest)
def rerank(asked: RerankRequest, done: _Done) -> Reranked:
    """Return documents in the order in which they go with a query, the best first."""
    (_, documents), scores = asked.sides(), done.scores(1)
    has_documents = not done.path.endswith("/v2/rerank")
    shows = has_documents if asked.return_documents is None else asked.return_documents
    order = sorted(range(len(scores)), key=lambda index: -scores[index])[: asked.top_n or None]
    results = [Ranked(index, scores[index], Document(documents[index]) if shows else UNSET) for index in order]
    return Reranked(id=done.id, model=done.model, results=results, usage=done.usage, meta=done.meta)
