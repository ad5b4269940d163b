"""What is counted of requests: how they ended, and histograms of their times and lengths."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from itertools import accumulate
from typing import Final

from octavo.core.outputs import RequestMetrics

_SHORT_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0)
_LONG_S = (0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1_000, 2_000, 5_000, 10_000, 20_000, 50_000, 100_000, 200_000)

HISTOGRAMS: Final = {
    "time_to_first_token_seconds": ("From the arrival of a request to its first token.", _LONG_S),
    "inter_token_latency_seconds": ("Between one token of a sequence and the next.", _SHORT_S),
    "time_per_output_token_seconds": ("Mean time for each token of a request behind the first.", _SHORT_S),
    "e2e_request_latency_seconds": ("From the arrival of a request to its end.", _LONG_S),
    "request_queue_time_seconds": ("From the arrival of a request to its first step.", _LONG_S),
    "request_prefill_time_seconds": ("From the first step of a request to its first token.", _LONG_S),
    "request_decode_time_seconds": ("From the first token of a request to its last.", _LONG_S),
    "request_inference_time_seconds": ("From the first step of a request to its last token.", _LONG_S),
    "request_prompt_tokens": ("Prompt tokens of a request.", _TOKENS),
    "request_generation_tokens": ("Tokens of a generated sequence.", _TOKENS),
    "request_max_num_generation_tokens": ("Tokens of the longest sequence of a request.", _TOKENS),
}
"""What each counts, and the upper limits of its buckets, in seconds or tokens; the last bucket, +Inf, is not listed."""

_REFUSAL_CODES: Final = ("queue_full", "deadline_unreachable")
"""Refusals that are counted from 0; others appear with the first one."""


class Buckets:
    """How many values were in each bucket, and their sum. It takes a fifth of the time of a Prometheus histogram."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = [*bounds, math.inf]
        self._counts = [0] * len(self._bounds)
        self.sum = 0.0

    def observe(self, value: float, count: int = 1) -> None:
        """Add a value `count` times."""
        self._counts[bisect_left(self._bounds, value)] += count
        self.sum += value * count

    def read(self) -> list[tuple[str, int]]:
        """Return the number of values up to each limit, as Prometheus writes it."""
        limits = ["+Inf" if bound == math.inf else str(float(bound)) for bound in self._bounds]
        return list(zip(limits, accumulate(self._counts), strict=True))


class RequestCounts:
    """Counts of the requests of one front. One thread at a time may change them.

    histograms: by their names in `HISTOGRAMS`. inter_token_latency: one of them, which gets each time since the last
    token of a request, once for each of its sequences. finished: sequences by why they ended. refused: requests by
    error code.
    """

    def __init__(self) -> None:
        self.histograms = {name: Buckets(bounds) for name, (_, bounds) in HISTOGRAMS.items()}
        self.inter_token_latency = self.histograms["inter_token_latency_seconds"]
        self.finished: Counter[str] = Counter()
        self.refused: Counter[str] = Counter(dict.fromkeys(_REFUSAL_CODES, 0))

    def observe_refusal(self, code: str) -> None:
        """Count a request that was refused. It has no latency, and its prompt was not computed."""
        self.refused[code] += 1

    def observe_request(
        self,
        metrics: RequestMetrics,
        *,
        num_prompt_tokens: int,
        num_generated_tokens: Sequence[int],
        finish_reasons: Sequence[str],
    ) -> None:
        """Add a request that has ended; lengths and reasons are by sequence."""
        self.finished.update(finish_reasons)
        longest = max(num_generated_tokens, default=0)
        observed = {
            "time_to_first_token_seconds": metrics.time_to_first_token,
            "request_queue_time_seconds": metrics.time_in_queue,
            "request_prompt_tokens": num_prompt_tokens,
            "request_max_num_generation_tokens": longest,
        }
        if metrics.finished_time is not None:
            observed["e2e_request_latency_seconds"] = metrics.finished_time - metrics.arrival_time
        began, first, last = metrics.first_scheduled_time, metrics.first_token_time, metrics.last_token_time
        if began is not None and first is not None and last is not None:
            observed |= {
                "request_prefill_time_seconds": first - began,
                "request_decode_time_seconds": last - first,
                "request_inference_time_seconds": last - began,
            }
            if longest > 1:
                observed["time_per_output_token_seconds"] = (last - first) / (longest - 1)
        for name, value in observed.items():
            if value is not None:
                self.histograms[name].observe(value)
        for length in num_generated_tokens:
            self.histograms["request_generation_tokens"].observe(length)
