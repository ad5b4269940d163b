"""Requests for vectors and scores instead of text, and what they return; the names are vLLM's."""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, Self

import msgspec

from octavo.core.outputs import RequestError, RequestOutput
from octavo.errors import InvalidRequest

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

EMBED: Final = "embed"
CLASSIFY: Final = "classify"
TOKEN_EMBED: Final = "token_embed"
TOKEN_CLASSIFY: Final = "token_classify"
TOKEN_TASKS: Final = (TOKEN_EMBED, TOKEN_CLASSIFY)
"""Tasks that make a row of values of each token."""
TASKS: Final = (EMBED, CLASSIFY, *TOKEN_TASKS)


class PoolingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How the vector of a prompt is made. Raises InvalidRequest for a wrong value.

    task: "embed" (one vector), "classify" (a score of each label, "score" is another name), "token_embed" (a vector of
        each token), or "token_classify" (the scores of each token); None is what the model is made for.
    dimensions: leading elements of the vector that are kept, before it is normalised; None keeps all.
    use_activation: whether vectors are normalised and scores made probabilities; None leaves it to the model.
    truncate_prompt_tokens: leading tokens that are kept of a longer prompt, special ones included; -1 keeps as many as
        the model takes. None refuses longer prompts.
    truncation_side: "right" cuts the end of such a prompt off, "left" its beginning, of which special tokens stay.
    """

    task: str | None = None
    dimensions: int | None = None
    use_activation: bool | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: str = "right"

    def __post_init__(self) -> None:
        if self.task == "score":
            msgspec.structs.force_setattr(self, "task", CLASSIFY)
        if self.task is not None and self.task not in TASKS:
            raise InvalidRequest(f"task is {self.task!r}, must be one of {', '.join(TASKS)}", field="task")
        _check_count("dimensions", self.dimensions)
        if self.truncate_prompt_tokens != -1:
            _check_count("truncate_prompt_tokens", self.truncate_prompt_tokens, " or -1")
        if self.truncation_side not in ("left", "right"):
            raise InvalidRequest(
                f"truncation_side is {self.truncation_side!r}, must be left or right", field="truncation_side"
            )
        if not isinstance(self.use_activation, bool | None):
            raise InvalidRequest(f"use_activation is {self.use_activation!r}, must be a flag", field="use_activation")


def _check_count(field: str, value: Any, others: str = "") -> None:
    is_count = isinstance(value, int) and not isinstance(value, bool) and value >= 1
    if value is not None and not is_count:
        raise InvalidRequest(f"{field} is {value!r}, must be a number of at least 1{others}", field=field)


class PooledPrompt(msgspec.Struct, frozen=True):
    """What the core needs to know of a request for a vector. `params.task` is set.

    second_start: the first token of the second text of a pair, where the model distinguishes the two; 0 for none.
    num_unseen: the last tokens, which no token sees.
    """

    params: PoolingParams
    second_start: int = 0
    num_unseen: int = 0

    @property
    def needs_all_tokens(self) -> bool:
        """Whether the hidden states of all prompt tokens are needed at once."""
        return self.params.task in TOKEN_TASKS


class PoolingOutput(msgspec.Struct, frozen=True):
    """data: float32 [size], or [tokens, size] of tasks that make a row of each token."""

    data: Any


class EmbeddingOutput(msgspec.Struct, frozen=True):
    """The vector of a prompt."""

    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        return len(self.embedding)


class ClassificationOutput(msgspec.Struct, frozen=True):
    """The score of each label."""

    probs: list[float]

    @property
    def num_classes(self) -> int:
        return len(self.probs)


class ScoringOutput(msgspec.Struct, frozen=True):
    """How well a text matches a query."""

    score: float


class PoolingRequestOutput(msgspec.Struct, kw_only=True):
    """The final output of a request for a vector. `outputs` is None where it has an `error`."""

    request_id: str
    outputs: Any
    prompt_token_ids: list[int]
    num_cached_tokens: int = 0
    finished: bool = True
    error: RequestError | None = None

    @classmethod
    def of(cls, output: RequestOutput | PoolingRequestOutput, outputs: Any) -> Self:
        """Return the output of a request with `outputs` made from its vector."""
        return cls(
            request_id=output.request_id,
            outputs=None if output.error is not None else outputs,
            prompt_token_ids=output.prompt_token_ids,
            num_cached_tokens=output.num_cached_tokens,
            error=output.error,
        )

    def made(self, make: Callable[[list[float]], Any]) -> Any:
        """Return what is made of the values of `outputs.data`; None where the request has an error."""
        return None if self.outputs is None else make(self.outputs.data.tolist())


class EmbeddingRequestOutput(PoolingRequestOutput):
    """`outputs` is an `EmbeddingOutput`."""


class ClassificationRequestOutput(PoolingRequestOutput):
    """`outputs` is a `ClassificationOutput`."""


class ScoringRequestOutput(PoolingRequestOutput):
    """`outputs` is a `ScoringOutput`."""


def values_of(pooled: bytes | None) -> list[float]:
    """Return the values of a vector in the form in which cores send them; none of a request that failed."""
    return array("f", pooled or b"").tolist()


def cosine(one: NDArray[np.float32], other: NDArray[np.float32]) -> float:
    """Return the cosine of the angle between two vectors [size]; 0 where one has no length. Elements of 0 take no time:
    those of a sparse vector are nearly all."""
    shared = (one != 0) & (other != 0)
    products = one[shared].astype("float64") * other[shared]
    lengths = math.hypot(*one[one != 0].tolist()) * math.hypot(*other[other != 0].tolist())
    return math.fsum(products.tolist()) / lengths if lengths else 0.0


def scored_pair(
    one: PoolingRequestOutput, other: PoolingRequestOutput, score: Callable[[Any, Any, list[int]], float]
) -> ScoringRequestOutput:
    """Return the output of a pair of texts by those of each. score: compares the `data`, and the tokens of `other`."""
    failed = one.error or other.error
    return ScoringRequestOutput(
        request_id=f"{one.request_id}_{other.request_id}",
        outputs=None if failed else ScoringOutput(score(one.outputs.data, other.outputs.data, other.prompt_token_ids)),
        prompt_token_ids=one.prompt_token_ids + other.prompt_token_ids,
        num_cached_tokens=one.num_cached_tokens + other.num_cached_tokens,
        error=failed,
    )
