"""Other views of a registry of metrics: with the counts of other servers, and under vLLM's names and labels."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

Counts = list[tuple[str, dict[str, str], float]]
"""Samples of one server: names, labels, values."""

_SAME: Final = (
    *("num_requests_running", "num_requests_waiting", "num_requests_swapped", "prompt_tokens", "generation_tokens"),
    *("prefix_cache_queries", "prefix_cache_hits", "num_preemptions", "request_success"),
    *("time_to_first_token_seconds", "inter_token_latency_seconds", "e2e_request_latency_seconds"),
    *("request_queue_time_seconds", "request_prefill_time_seconds", "request_decode_time_seconds"),
    *("spec_decode_num_drafts", "spec_decode_num_draft_tokens", "spec_decode_num_accepted_tokens"),
    *("spec_decode_num_accepted_tokens_per_pos", "lora_requests_info"),
    *("request_inference_time_seconds", "request_prompt_tokens", "request_generation_tokens"),
    "request_max_num_generation_tokens",
)
_NAMES: Final = {name: (name,) for name in _SAME} | {
    "kv_cache_usage_perc": ("kv_cache_usage_perc", "gpu_cache_usage_perc"),  # the second is that of older versions
    "time_per_output_token_seconds": ("request_time_per_output_token_seconds",),
    "open_websockets": ("websocket_connections_active",),
    "fetched_tokens": ("external_prefix_cache_hits",),
}
"""vLLM's names of octavo's metrics. The others are octavo's own, or vLLM counts something else under their names."""


class SummedMetrics(Collector):
    """A view of a registry with the counts of other servers added to its own."""

    def __init__(self, registry: CollectorRegistry, others: Sequence[Counts]) -> None:
        self._registry = registry
        self._sums: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
        for counts in others:
            for name, labels, value in counts:
                key = name, tuple(sorted(labels.items()))
                self._sums[key] = self._sums.get(key, 0.0) + value

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics of the registry; one may have values of a label that other servers alone have counted."""
        left = dict(self._sums)
        for metric in self._registry.collect():
            samples = [
                sample._replace(value=sample.value + left.pop((sample.name, tuple(sorted(sample.labels.items()))), 0.0))
                for sample in metric.samples
            ]
            names = {sample.name for sample in metric.samples}
            samples += [Sample(name, dict(labels), value) for (name, labels), value in left.items() if name in names]
            left = {key: value for key, value in left.items() if key[0] not in names}
            summed = Metric(metric.name, metric.documentation, metric.type)
            summed.samples = samples
            yield summed


class VllmMetrics(Collector):
    """A second view of a registry: nothing is counted twice."""

    def __init__(self, registry: CollectorRegistry | Collector) -> None:
        self._registry = registry

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics that vLLM has too."""
        return under_vllm_names(self._registry.collect())


def under_vllm_names(metrics: Iterable[Metric]) -> Iterator[Metric]:
    """Yield those of octavo's metrics that vLLM has too, with its names and labels."""
    for metric in metrics:
        own = metric.name.removeprefix("octavo:")
        for name in _NAMES.get(own, ()):
            renamed = Metric(f"vllm:{name}", metric.documentation, metric.type)
            renamed.samples = _as_vllm(metric.samples, metric.name, renamed.name)
            yield renamed


def _as_vllm(samples: list[Sample], name: str, new_name: str) -> list[Sample]:
    """Return samples with vLLM's labels: each gets the label `engine`, and samples are summed over labels that vLLM
    lacks. Samples of the host tier are left out: host blocks are not part of the device's cache.
    """
    sums: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
    for sample in samples:
        if sample.name.endswith("_created") or sample.labels.get("tier") == "host":
            continue
        labels = {"engine": "0"} | sample.labels
        kept = tuple((label, value) for label, value in labels.items() if label not in ("tier", "mode", "role"))
        key = (new_name + sample.name.removeprefix(name), kept)
        sums[key] = sums.get(key, 0.0) + sample.value
    return [Sample(sample_name, dict(labels), value) for (sample_name, labels), value in sums.items()]
