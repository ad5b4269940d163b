"""The outputs that callers receive."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

from octavo.errors import InvalidRequest

FIRST_WEIGHT_VERSION: Final = "default"
"""The label of weights that were given none, as in vLLM."""


class Logprob(msgspec.Struct, frozen=True, gc=False):
    """The log-probability of one token at one position, under the model's distribution before any filter.

    `rank` is 1 for the likeliest token of the vocabulary.
    """

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


class WeightVersionSpan(msgspec.Struct, frozen=True, gc=False):
    """The tokens [start, end) of an output were drawn with the weights that had the label `version`."""

    version: str
    start: int
    end: int


class CompletionOutput(msgspec.Struct, kw_only=True):
    """One sequence of a request.

    finish_reason: None while running, then 'stop', 'length', 'repetition', 'abort' or 'error'.
    stop_reason: the stop string or stop token id that ended it; None for an end-of-sequence token.
    logprobs: for each token, a mapping from token id to Logprob: the likeliest ones and the drawn one. It is made when
        it is read, but for outputs that hold only what is new, where this is a list.
    text_offsets: for each token, the index of the character of the whole text that its first byte is part of. None
        without logprobs.
    cumulative_logprob: the sum for the drawn tokens. None where the request needs none: without logprobs, a best_of
        above n, or beams.
    weight_versions: which weights drew which of all its tokens, once it has ended; None without a label of weights.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: Sequence[dict[int, Logprob]] | None = None
    text_offsets: list[int] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    weight_versions: list[WeightVersionSpan] | None = None

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


class RequestMetrics(msgspec.Struct, kw_only=True):
    """Times of one request in seconds on the monotonic clock of the engine core."""

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    last_token_time: float | None = None
    finished_time: float | None = None
    num_preemptions: int = 0
    num_draft_tokens: int = 0
    """The number of draft tokens that steps have verified, and how many of them were right."""
    num_accepted_tokens: int = 0
    timeline: list[tuple[float, str]] = []
    """What happened to the request, and when: queued, scheduled, preempted, swapped in, first token, and how it ended
    (finished, aborted, failed, refused)."""

    @classmethod
    def begin(cls, arrival_time: float) -> RequestMetrics:
        """Return the times of a request that has just arrived."""
        return cls(arrival_time=arrival_time, timeline=[(arrival_time, "queued")])

    def copy(self) -> RequestMetrics:
        """Return a copy with a timeline of its own."""
        return msgspec.structs.replace(self, timeline=list(self.timeline))

    def end(self, time: float, how: str) -> None:
        """Add the end of the request to the timeline; nothing may be added after it."""
        self.finished_time = time
        self.note(time, how)

    def note(self, time: float, event: str) -> None:
        """Add an event to the timeline."""
        self.timeline.append((time, event))

    @property
    def time_in_queue(self) -> float | None:
        return None if self.first_scheduled_time is None else self.first_scheduled_time - self.arrival_time

    @property
    def time_to_first_token(self) -> float | None:
        return None if self.first_token_time is None else self.first_token_time - self.arrival_time

    # the names of vLLM's RequestStateStats, by which programs read times

    @property
    def queued_ts(self) -> float:
        return self.arrival_time

    @property
    def scheduled_ts(self) -> float | None:
        return self.first_scheduled_time

    @property
    def first_token_ts(self) -> float | None:
        return self.first_token_time

    @property
    def last_token_ts(self) -> float | None:
        return self.last_token_time

    @property
    def first_token_latency(self) -> float | None:
        return self.time_to_first_token


class RequestError(msgspec.Struct, frozen=True):
    """Why a request ended with an error: one line for a person, the field in question, a word for machines.

    `is_client_error`: True for a mistake of the caller (HTTP 4xx), False for a failure of the engine (5xx).
    `retry_after_s`: set when the queue was the reason; the request may be sent again then. `public_message`: the
    message for a client that may not learn how much others have sent; empty where the message holds nothing of that.
    """

    message: str
    field: str | None = None
    code: str = "internal_error"
    is_client_error: bool = False
    retry_after_s: int | None = None
    public_message: str = ""

    @classmethod
    def of(cls, error: InvalidRequest) -> RequestError:
        """Return the error of a request that is refused."""
        return cls(str(error), field=error.field, code=error.code, is_client_error=True)


class RequestOutput(msgspec.Struct, kw_only=True):
    """State of one request: outputs in the order of their index. With OutputKind.DELTA they hold only what is new.

    prompt_logprobs: None for the first position, then a mapping from token id to Logprob for each further one.
    num_cached_tokens: prompt tokens whose keys and values were found in the prefix cache.
    num_fetched_tokens: further ones whose keys and values came from another engine, or from where they are kept.
    cache_miss_reason: why not more of them were found; None when no more could be: the last token of a prompt is always
        computed.
    num_generated_tokens: tokens of all its sequences so far, with those of best_of that are not returned. Of a beam
        search those of the returned beams.
    pooled: of a request for a vector its values, float32.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    num_cached_tokens: int = 0
    num_fetched_tokens: int = 0
    cache_miss_reason: str | None = None
    num_generated_tokens: int = 0
    metrics: RequestMetrics | None = None
    error: RequestError | None = None
    pooled: bytes | None = None

    @classmethod
    def refused(cls, request_id: str, prompt: str | None, num_outputs: int, error: InvalidRequest) -> RequestOutput:
        """Return the final output of a request that never reached the core."""
        ended = [
            CompletionOutput(index=index, text="", token_ids=[], finish_reason="error") for index in range(num_outputs)
        ]
        return cls(
            request_id=request_id,
            prompt=prompt,
            prompt_token_ids=[],
            outputs=ended,
            finished=True,
            error=RequestError.of(error),
        )


class PinnedPrefix(msgspec.Struct, frozen=True, kw_only=True):
    """The part of a prefix that a pin keeps in the cache.

    num_tokens: leading tokens that are kept until the pin ends, in whole blocks.
    num_cached_tokens: those of them that are computed already; the others stay from when a request computes them.
    because: why it is not all of the prefix; empty when it is.
    """

    num_tokens: int = 0
    num_cached_tokens: int = 0
    because: str = ""
