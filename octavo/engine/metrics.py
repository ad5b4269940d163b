"""Prometheus metrics of one engine, in a registry of their own."""

from __future__ import annotations

from collections import Counter as Count
from collections.abc import Sequence
from typing import Final, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from octavo.core.messages import SchedulerStats
from octavo.core.outputs import RequestMetrics

_Collector = TypeVar("_Collector", Gauge, Counter, Histogram)

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"

_SHORT_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0)
_LONG_S = (0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1_000, 2_000, 5_000, 10_000, 20_000, 50_000, 100_000, 200_000)

_GAUGES = {
    "num_requests_running": ("Requests with sequences in the running batch.", "num_running"),
    "num_requests_waiting": ("Requests that wait to be admitted.", "num_waiting"),
    "num_requests_swapped": ("Requests whose blocks are in host memory.", "num_swapped"),
    "host_cache_usage_perc": ("Share of the host's KV blocks in use, from 0 to 1.", "host_cache_usage"),
    "num_pinned_blocks": ("KV blocks that pinned prefixes hold.", "num_pinned_blocks"),
    "kv_cache_usage_perc": ("Share of the KV blocks in use, from 0 to 1.", "kv_cache_usage"),
}
_COUNTERS = {
    "prompt_tokens": ("Prompt tokens computed or found in the prefix cache.", "num_prompt_tokens"),
    "generation_tokens": ("Tokens generated.", "num_generated_tokens"),
    "prefix_cache_queries": ("Prompt tokens looked up in the prefix cache.", "num_queried_tokens"),
    "prefix_cache_hits": ("Prompt tokens found in the prefix cache.", "num_cached_tokens"),
    "num_preemptions": ("Times that a running request had to give its blocks back.", "num_preemptions"),
    "num_preemptions_by_swap": ("Preemptions that moved blocks to the host.", "num_preemptions_by_swap"),
    "swapped_blocks": ("Blocks moved between device and host.", "num_swapped_blocks"),
    "recomputed_tokens": ("Tokens computed once more after a preemption.", "num_recomputed_tokens"),
    "engine_steps": ("Steps of the engine.", "num_steps"),
}
"""Name, documentation, and the field of SchedulerStats that adds up since the start."""


class Metrics:
    """Collectors fed with the state after each step and with every request that ends. One thread at a time."""

    def __init__(self, model_name: str) -> None:
        self.registry = CollectorRegistry()
        self._labels = {"model_name": model_name}
        self._last = SchedulerStats()
        self._gauges = {
            field: self._labelled(Gauge(f"octavo:{name}", doc, ["model_name"], registry=self.registry))
            for name, (doc, field) in _GAUGES.items()
        }
        self._counters = {
            field: self._labelled(Counter(f"octavo:{name}", doc, ["model_name"], registry=self.registry))
            for name, (doc, field) in _COUNTERS.items()
        }
        self._finished = Counter(
            "octavo:request_success",
            "Sequences that ended, by reason.",
            ["model_name", "finished_reason"],
            registry=self.registry,
        )
        self._time_to_first_token = self._histogram(
            "time_to_first_token_seconds", "From the arrival of a request to its first token.", _LONG_S
        )
        self._inter_token_latency = self._histogram(
            "inter_token_latency_seconds", "Between one token of a sequence and the next.", _SHORT_S
        )
        self._time_per_output_token = self._histogram(
            "time_per_output_token_seconds", "Mean time for each token of a request behind the first.", _SHORT_S
        )
        self._latency = self._histogram(
            "e2e_request_latency_seconds", "From the arrival of a request to its end.", _LONG_S
        )
        self._queue_time = self._histogram(
            "request_queue_time_seconds", "From the arrival of a request to its first step.", _LONG_S
        )
        self._prompt_length = self._histogram("request_prompt_tokens", "Prompt tokens of a request.", _TOKENS)
        self._output_length = self._histogram("request_generation_tokens", "Tokens of a generated sequence.", _TOKENS)

    def observe_stats(self, stats: SchedulerStats) -> None:
        """Take in the state after a step."""
        for field, gauge in self._gauges.items():
            gauge.set(getattr(stats, field))
        for field, counter in self._counters.items():
            # stats of a core add up; Prometheus wants the difference
            counter.inc(max(0, getattr(stats, field) - getattr(self._last, field)))
        self._last = stats

    def observe_inter_token_latency(self, seconds: float, num_sequences: int) -> None:
        """Take in the time since the last token of a request, once for each of its sequences."""
        for _ in range(num_sequences):
            self._inter_token_latency.observe(seconds)

    def observe_request(
        self,
        metrics: RequestMetrics,
        *,
        num_prompt_tokens: int,
        num_generated_tokens: Sequence[int],
        finish_reasons: Sequence[str],
    ) -> None:
        """Take in a request that has ended; lengths and reasons are by sequence."""
        for reason, number in Count(finish_reasons).items():
            self._finished.labels(**self._labels, finished_reason=reason).inc(number)
        self._prompt_length.observe(num_prompt_tokens)
        for length in num_generated_tokens:
            self._output_length.observe(length)
        if metrics.time_to_first_token is not None:
            self._time_to_first_token.observe(metrics.time_to_first_token)
        if metrics.time_in_queue is not None:
            self._queue_time.observe(metrics.time_in_queue)
        if metrics.finished_time is not None:
            self._latency.observe(metrics.finished_time - metrics.arrival_time)
        longest = max(num_generated_tokens, default=0)
        if longest > 1 and metrics.first_token_time is not None and metrics.last_token_time is not None:
            self._time_per_output_token.observe((metrics.last_token_time - metrics.first_token_time) / (longest - 1))

    def render(self) -> bytes:
        """All metrics in Prometheus' text format (`CONTENT_TYPE`)."""
        return generate_latest(self.registry)

    def _histogram(self, name: str, doc: str, buckets: Sequence[float]) -> Histogram:
        collector = Histogram(f"octavo:{name}", doc, ["model_name"], registry=self.registry, buckets=buckets)
        return self._labelled(collector)

    def _labelled(self, collector: _Collector) -> _Collector:
        return collector.labels(**self._labels)
