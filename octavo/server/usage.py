"""The token counts and times of requests for generated text, as responses show them."""

from __future__ import annotations

from msgspec import UNSET, Struct, UnsetType

from octavo.core.outputs import RequestMetrics, RequestOutput
from octavo.server.schema.common import GenerationRequest


class CacheInfo(Struct, frozen=True):
    """The tokens of one prompt that were in the prefix cache. `miss_reason`: why not more; None if all were.
    `fetched_tokens`: tokens whose KV came from another engine or from a tier (host memory, disk); the others were
    computed."""

    prompt_tokens: int
    cached_tokens: int
    miss_reason: str | None
    fetched_tokens: int = 0


class PromptTokensDetails(Struct, frozen=True):
    """Prompt tokens by where their KV came from, which add up; with `return_cache_info` also by prompt."""

    cached_tokens: int
    fetched_tokens: int
    computed_tokens: int
    cache_info: list[CacheInfo] | UnsetType = UNSET


class Timings(Struct, frozen=True):
    """The times of one prompt in milliseconds, with llama.cpp's names. n: number of tokens; `cache_n` of the prompt's
    had their KV already, `prompt_n` were computed. Times of phases that were not reached are null."""

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
        """Return the timings of a request. num_generated: number of output tokens; the first comes with the prompt's
        last step."""
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
    """The number of output tokens that are reasoning, if reasoning is read, and of accepted and rejected guesses, if
    any guess was verified."""

    reasoning_tokens: int | UnsetType = UNSET
    accepted_prediction_tokens: int | UnsetType = UNSET
    rejected_prediction_tokens: int | UnsetType = UNSET


class TokenCounts(Struct, frozen=True):
    """Token counts of a request: each prompt once, the outputs of all choices."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class Usage(TokenCounts, frozen=True):
    """Adds details. `timings`: with `return_timings`, for each prompt."""

    prompt_tokens_details: PromptTokensDetails
    timings: list[Timings] | UnsetType = UNSET
    completion_tokens_details: CompletionTokensDetails | UnsetType = UNSET


class UsageCounts:
    """Adds up the token counts of one request over the outputs of its prompts, each at the same cost."""

    def __init__(self, num_prompts: int, asked: GenerationRequest, *, speculates: bool = False) -> None:
        self._last: list[RequestOutput | None] = [None] * num_prompts
        self._counts = [(0, 0, 0, 0)] * num_prompts
        self._sums = [0, 0, 0, 0]
        """Numbers of prompt tokens, cached ones, fetched ones, and generated tokens."""
        self._unread: dict[int, RequestOutput] = {}
        self._speculates = speculates
        self._asked = asked

    def set(self, index: int, output: RequestOutput) -> None:
        """Set the counts of prompt `index` from its latest output. They are added up when they are asked for."""
        self._unread[index] = output

    def num_new(self) -> int:
        before = self._sums[0] + self._sums[3]
        self._read()
        return self._sums[0] + self._sums[3] - before

    def _read(self) -> None:
        for index, output in self._unread.items():
            prompt = len(output.prompt_token_ids), output.num_cached_tokens, output.num_fetched_tokens
            counts, before = (*prompt, output.num_generated_tokens), self._counts[index]
            self._sums = [each + new - old for each, new, old in zip(self._sums, counts, before, strict=True)]
            self._last[index], self._counts[index] = output, counts
        self._unread.clear()

    @property
    def _known(self) -> list[RequestOutput]:
        return [output for output in self._last if output is not None]

    def usage(self, num_reasoning: int | None = None, *, without_completion: bool = False) -> Usage:
        """Return the counts of all prompts together. num_reasoning: tokens of reasoning; None if reasoning is not
        read."""
        self._read()
        num_tokens, num_cached, num_fetched, num_generated = self._sums
        timed = [(each, each.metrics) for each in self._known if each.metrics is not None]
        infos: list[CacheInfo] | UnsetType = UNSET
        timings: list[Timings] | UnsetType = UNSET
        if self._asked.return_cache_info:
            infos = [
                CacheInfo(
                    len(each.prompt_token_ids), each.num_cached_tokens, each.cache_miss_reason, each.num_fetched_tokens
                )
                for each in self._known
            ]
        if self._asked.return_timings:
            timings = [Timings.of(each, times, each.num_generated_tokens) for each, times in timed]
        known: dict[str, int] = {} if num_reasoning is None else {"reasoning_tokens": num_reasoning}
        if self._speculates:
            known["accepted_prediction_tokens"] = sum(times.num_accepted_tokens for _, times in timed)
            known["rejected_prediction_tokens"] = (
                sum(times.num_draft_tokens for _, times in timed) - known["accepted_prediction_tokens"]
            )
        num_shown = 0 if without_completion else num_generated
        details = PromptTokensDetails(num_cached, num_fetched, num_tokens - num_cached - num_fetched, infos)
        of_completion = CompletionTokensDetails(**known) if known else UNSET
        return Usage(num_tokens, num_shown, num_tokens + num_shown, details, timings, of_completion)
