"""What responses with generated text have in common."""

from __future__ import annotations

from msgspec import UNSET, Struct, UnsetType

from octavo.core.outputs import Logprob, RequestMetrics, RequestOutput


class CacheInfo(Struct, frozen=True):
    """The tokens of one prompt that were in the prefix cache. `miss_reason`: why not more; None if all were.
    `fetched_tokens`: those whose KV came from another engine or from where it is kept; the rest was computed."""

    prompt_tokens: int
    cached_tokens: int
    miss_reason: str | None
    fetched_tokens: int = 0

    @classmethod
    def of(cls, output: RequestOutput) -> CacheInfo:
        num_tokens, num_cached = len(output.prompt_token_ids), output.num_cached_tokens
        return cls(num_tokens, num_cached, output.cache_miss_reason, output.num_fetched_tokens)


class PromptTokensDetails(Struct, frozen=True):
    """Prompt tokens by where their KV came from, which add up; with `return_cache_info` also by prompt."""

    cached_tokens: int
    fetched_tokens: int
    computed_tokens: int
    cache_info: list[CacheInfo] | UnsetType = UNSET


class Timings(Struct, frozen=True):
    """Where the time of one prompt went, in milliseconds, with llama.cpp's names. n: tokens; `cache_n` of the prompt's
    had their KV already, `prompt_n` were computed. Times of parts that were not reached are null."""

    cache_n: int
    prompt_n: int
    predicted_n: int
    queue_ms: float | None
    prompt_ms: float | None
    predicted_ms: float | None
    prompt_per_second: float | None
    predicted_per_second: float | None

    @classmethod
    def of(cls, output: RequestOutput, times: RequestMetrics, num_generated: int) -> Timings:
        """Return those of a request. num_generated: tokens, of which the first comes with the prompt's last step."""
        found = output.num_cached_tokens + output.num_fetched_tokens
        computed = len(output.prompt_token_ids) - found
        prompt_ms = _ms(times.first_scheduled_time, times.first_token_time)
        predicted_ms = _ms(times.first_token_time, times.last_token_time)
        rates = [
            round(1e3 * number / ms, 3) if ms else None
            for number, ms in ((computed, prompt_ms), (num_generated - 1, predicted_ms))
        ]
        queue_ms = _ms(times.arrival_time, times.first_scheduled_time)
        return cls(found, computed, num_generated, queue_ms, prompt_ms, predicted_ms, *rates)


def _ms(start: float | None, end: float | None) -> float | None:
    return None if start is None or end is None else round(1e3 * (end - start), 3)


class CompletionTokensDetails(Struct, frozen=True):
    """How many of the output tokens are reasoning, where it is read, and what became of guesses of the next tokens,
    where any was verified."""

    reasoning_tokens: int | UnsetType = UNSET
    accepted_prediction_tokens: int | UnsetType = UNSET
    rejected_prediction_tokens: int | UnsetType = UNSET


class Usage(Struct, frozen=True):
    """Token counts of a request: each prompt once, the outputs of all choices. `timings`: with `return_timings`, for
    each prompt."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    timings: list[Timings] | UnsetType = UNSET
    completion_tokens_details: CompletionTokensDetails | UnsetType = UNSET


PromptLogprobsField = list[dict[int, Logprob] | None] | UnsetType


class Generated(Struct, kw_only=True):
    """What every response with generated text, and every chunk of its stream, has."""

    id: str
    created: int
    model: str
    system_fingerprint: str
