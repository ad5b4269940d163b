"""The responses to requests for vectors and scores."""

from __future__ import annotations

from typing import Any

from msgspec import UNSET, Struct, UnsetType


class VectorUsage(Struct, frozen=True):
    """Token counts of all prompts together."""

    prompt_tokens: int
    total_tokens: int
    completion_tokens: int = 0


class Embedding(Struct, frozen=True):
    """The vector of an input: numbers, or the base64 text of little-endian float32."""

    index: int
    embedding: list[float] | str
    object: str = "embedding"


class Pooled(Struct, frozen=True):
    """What the model made of an input: numbers, rows of them for its tokens, or base64 text."""

    index: int
    data: list[float | list[float]] | str
    object: str = "pooling"


class Classification(Struct, frozen=True):
    """The scores of the labels for an input; `label` is the likeliest."""

    index: int
    label: str
    probs: list[float]
    num_classes: int


class Score(Struct, frozen=True):
    """How well a pair goes together."""

    index: int
    score: float
    object: str = "score"


class VectorList(Struct, kw_only=True):
    """What lists of results have besides these."""

    id: str
    created: int
    model: str
    usage: VectorUsage
    object: str = "list"


class EmbeddingList(VectorList, kw_only=True):
    """The response of `POST /v1/embeddings`."""

    data: list[Embedding]


class PooledList(VectorList, kw_only=True):
    """The response of `POST /pooling`."""

    data: list[Pooled]


class ClassificationList(VectorList, kw_only=True):
    """The response of `POST /classify`."""

    data: list[Classification]


class ScoreList(VectorList, kw_only=True):
    """The response of `POST /score`."""

    data: list[Score]


class RankedDocument(Struct, frozen=True):
    """The text of a document."""

    text: str


class Ranked(Struct, frozen=True):
    """A document by its index in the request."""

    index: int
    relevance_score: float
    document: RankedDocument | UnsetType = UNSET


class Reranked(Struct, kw_only=True):
    """The response of `POST /rerank`: the best document first."""

    id: str
    model: str
    results: list[Ranked]
    usage: VectorUsage
    meta: dict[str, Any]


class CohereEmbeddings(Struct, kw_only=True):
    """The response of `POST /v2/embed`: the vectors by the types that were asked for."""

    id: str
    embeddings: dict[str, list[list[float] | str]]
    texts: list[str]
    meta: dict[str, Any]
