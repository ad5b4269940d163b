"""Prometheus metrics of one engine, in a registry of their own."""

from __future__ import annotations

import time
from collections import Counter as Count
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Final, NamedTuple, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from octavo.core.messages import SchedulerStats
from octavo.engine.output.metric_views import Counts, SummedMetrics, VllmMetrics
from octavo.engine.output.request_counts import HISTOGRAMS, RequestCounts

_Collector = TypeVar("_Collector", Gauge, Counter)

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"


class _Family(NamedTuple):
    """A metric, and the attribute of SchedulerStats for each value of its label ("" where it has none)."""

    doc: str
    attributes: dict[str, str]
    label: str = ""


def _plain(doc: str, attribute: str) -> _Family:
    return _Family(doc, {"": attribute})


_GAUGES: Final = {
    "num_requests_running": _plain("Requests with sequences in the running batch.", "num_running"),
    "num_requests_waiting": _plain("Requests that wait to be admitted.", "num_waiting"),
    "num_requests_swapped": _plain("Requests whose blocks are in host memory.", "num_swapped"),
    "num_pinned_blocks": _plain("KV blocks that pinned prefixes hold.", "num_pinned_blocks"),
    "kv_cache_usage_perc": _Family(
        "Share of the KV blocks in use, from 0 to 1.", {"device": "kv_cache_usage", "host": "host_cache_usage"}, "tier"
    ),
    "kv_cache_used_blocks": _Family(
        "KV blocks in use.", {"device": "num_used_blocks", "host": "num_used_host_blocks"}, "tier"
    ),
    "adapters_waiting": _plain("Adapters that waiting requests need.", "num_waiting_adapters"),
    "cores_ready": _plain("Engine cores that work.", "num_ready"),
    "cores_paused": _plain("Engine cores whose requests a pause holds back.", "num_paused"),
    "cores_sleeping": _plain("Engine cores without weights and KV cache.", "num_sleeping"),
    "kv_cache_blocks": _Family("KV blocks there are.", {"device": "num_blocks", "host": "num_host_blocks"}, "tier"),
}
_COUNTERS: Final = {
    "prompt_tokens": _plain("Prompt tokens computed or found in the prefix cache.", "num_prompt_tokens"),
    "generation_tokens": _plain("Tokens generated.", "num_generated_tokens"),
    "prefix_cache_queries": _plain("Prompt tokens looked up in the prefix cache.", "num_queried_tokens"),
    "prefix_cache_hits": _plain("Prompt tokens found in the prefix cache.", "num_cached_tokens"),
    "fetched_tokens": _plain(
        "Prompt tokens whose KV came from another engine, or from where it is kept.", "num_fetched_tokens"
    ),
    "num_preemptions": _Family(
        "Times that a running request lost its blocks, by what becomes of them.",
        {"recompute": "num_preemptions_by_recompute", "swap": "num_preemptions_by_swap"},
        "mode",
    ),
    "swapped_blocks": _Family(
        "Blocks moved from the device to the host (out) and back (in).",
        {"out": "num_swapped_out_blocks", "in": "num_swapped_in_blocks"},
        "direction",
    ),
    "recomputed_tokens": _plain("Tokens computed once more after a preemption.", "num_recomputed_tokens"),
    "spec_decode_num_drafts": _plain("Rows that have verified guesses of tokens.", "num_drafts"),
    "spec_decode_num_draft_tokens": _plain("Guesses of tokens that steps have verified.", "num_draft_tokens"),
    "spec_decode_num_accepted_tokens": _plain("Guesses that were right.", "num_accepted_tokens"),
    "engine_steps": _plain("Steps of the engine.", "num_steps"),
    "core_restarts": _plain("Times that an engine core was started again after its death.", "num_restarts"),
    "requests_resumed": _plain("Requests that went on after the death or the drain of their core.", "num_resumed"),
    "handovers": _plain("Requests whose prompts were begun by a prefill core.", "num_handovers"),
    "handover_mismatches": _plain(
        "Requests that ended because prefill and decode cores drew different first tokens.", "num_handover_mismatches"
    ),
}
"""Totals since the start. Names are vLLM's where it has the same metric."""

_ADAPTER_INFO: Final = "octavo:lora_requests_info"

_PER_POSITION: Final = "spec_decode_num_accepted_tokens_per_pos"


@dataclass
class _Replica:
    """The collectors of a replica for each attribute of SchedulerStats, and its latest state."""

    gauges: dict[str, Gauge]
    counters: dict[str, Counter]
    labels: dict[str, str]
    last: SchedulerStats = field(default_factory=SchedulerStats)


def _children(families: Sequence[tuple[_Collector, _Family]], labels: Mapping[str, str]) -> dict[str, _Collector]:
    return {
        attribute: collector.labels(**labels, **({family.label: value} if value else {}))
        for collector, family in families
        for value, attribute in family.attributes.items()
    }


class _Requests(Collector):
    """The counts of requests as Prometheus' library has them."""

    def __init__(self, counts: RequestCounts, labels: Mapping[str, str]) -> None:
        self._counts, self._labels = counts, labels

    def collect(self) -> Iterator[Metric]:
        """Yield all of them."""
        names, values = list(self._labels), list(self._labels.values())
        for name, doc, label, counts in (
            ("requests_refused", "Requests that the engine refused, by error code.", "code", self._counts.refused),
            ("request_success", "Sequences that ended, by reason.", "finished_reason", self._counts.finished),
        ):
            counter = CounterMetricFamily(f"octavo:{name}", doc, labels=[*names, label])
            for value, count in list(counts.items()):  # at once: another thread may add to it
                counter.add_metric([*values, value], count)
            yield counter
        for name, (doc, _) in HISTOGRAMS.items():
            buckets = self._counts.histograms[name]
            histogram = HistogramMetricFamily(f"octavo:{name}", doc, labels=names)
            histogram.add_metric(values, buckets.read(), buckets.sum)
            yield histogram


class _AdapterInfo(Collector):
    """Names of adapters in labels, as vLLM has them: the value is the time of the latest step."""

    def __init__(self) -> None:
        self._samples: dict[int, tuple[dict[str, str], float]] = {}

    def observe(self, stats: SchedulerStats, replica: int, labels: Mapping[str, str]) -> None:
        """Take the state of a replica that has slots for adapters."""
        own = {
            "max_lora": str(stats.max_adapters),
            "running_lora_adapters": ",".join(stats.running_adapters),
            "waiting_lora_adapters": ",".join(stats.waiting_adapters),
        }
        self._samples[replica] = ({**labels, **own}, time.time())

    def collect(self) -> Iterator[Metric]:
        """Yield the metric where an engine takes adapters."""
        if self._samples:
            doc = "Adapters that requests run and wait with, in labels; the time of the latest step."
            metric = Metric(_ADAPTER_INFO, doc, "gauge")
            metric.samples = [Sample(_ADAPTER_INFO, labels, value) for labels, value in self._samples.values()]
            yield metric


_OF_CORES: Final = {_ADAPTER_INFO, *(f"octavo:{name}" for name in (*_GAUGES, *_COUNTERS, _PER_POSITION))}
"""Metrics of cores; the others are of requests."""


class Metrics:
    """Collectors fed with the state after each step, and the counts of requests. One thread at a time.

    requests: where every request that ends is counted.
    Of several replicas the states have the label `engine`, a replica's number, and those with roles the label `role`.
    """

    def __init__(
        self,
        model_name: str,
        roles: Mapping[int, str | None] | None = None,
        can_grow: bool = False,
        requests: RequestCounts | None = None,
    ) -> None:
        """roles: of the replicas, by their numbers; entries may be added to it where it `can_grow`. requests: their
        counts, where they are kept already."""
        self.registry = CollectorRegistry()
        self.requests = requests or RequestCounts()
        self._labels = {"model_name": model_name}
        self._roles = {0: None} if roles is None else roles
        self._has_engines = can_grow or len(self._roles) > 1
        self._has_roles = can_grow or any(self._roles.values())
        self._gauges = self._collectors(Gauge, _GAUGES)
        self._counters = self._collectors(Counter, _COUNTERS)
        positions = _Family("Guesses that were right, by their place among those of their row.", {}, "position")
        ((self._accepted, _),) = self._collectors(Counter, {_PER_POSITION: positions})
        self._adapters: Gauge | None = None
        websockets = Gauge("octavo:open_websockets", "Open WebSockets.", ["model_name"], registry=self.registry)
        self._websockets = websockets.labels(**self._labels)
        self._adapter_info = _AdapterInfo()
        self.registry.register(self._adapter_info)
        self._num_adapted: Count[str] = Count()
        self._replicas: dict[int, _Replica] = {}
        for number in self._roles:
            self._replica(number)
        self.registry.register(_Requests(self.requests, self._labels))

    def observe_stats(self, stats: SchedulerStats, replica: int = 0) -> None:
        """Add the state of a replica after a step."""
        known = self._replica(replica)
        for attribute, gauge in known.gauges.items():
            gauge.set(getattr(stats, attribute))
        for attribute, counter in known.counters.items():
            # stats of a core are totals; Prometheus counts differences
            counter.inc(max(0, getattr(stats, attribute) - getattr(known.last, attribute)))
        accepted = zip_longest(stats.accepted_per_position, known.last.accepted_per_position, fillvalue=0)
        for position, (count, before) in enumerate(accepted):
            self._accepted.labels(**known.labels, position=str(position)).inc(max(0, count - before))
        known.last = stats
        if stats.max_adapters:
            self._adapter_info.observe(stats, replica, known.labels)

    @contextmanager
    def adapter_in_use(self, name: str, num_requests: int) -> Iterator[None]:
        """Count requests as open ones of an adapter inside the context."""
        if self._adapters is None:
            doc = "Open requests that use an adapter."
            self._adapters = Gauge("octavo:adapter_requests", doc, ["model_name", "adapter"], registry=self.registry)
        self._num_adapted[name] += num_requests
        self._adapters.labels(**self._labels, adapter=name).set(self._num_adapted[name])
        try:
            yield
        finally:
            self._num_adapted[name] -= num_requests
            if self._num_adapted[name]:
                self._adapters.labels(**self._labels, adapter=name).set(self._num_adapted[name])
            else:
                del self._num_adapted[name]
                self._adapters.remove(*self._labels.values(), name)

    def open_websocket(self) -> AbstractContextManager[object]:
        """Count a WebSocket as an open one inside the context."""
        return self._websockets.track_inprogress()

    def render(self, *, vllm_names: bool = False, others: Sequence[Counts] = ()) -> bytes:
        """Return all metrics in Prometheus' text format (`CONTENT_TYPE`). vllm_names: add those that vLLM has under its
        names.

        others: `counts` of other servers of the same cores, which are added.
        """
        whole = SummedMetrics(self.registry, others) if others else self.registry
        return generate_latest(whole) + (generate_latest(VllmMetrics(whole)) if vllm_names else b"")

    def counts(self) -> Counts:
        """Return the samples of requests, without those of the cores, which all servers of the same cores have."""
        return [
            (sample.name, sample.labels, sample.value)
            for metric in self.registry.collect()
            if metric.name not in _OF_CORES
            for sample in metric.samples
            if not sample.name.endswith("_created")
        ]

    def _collectors(self, kind: type[_Collector], families: Mapping[str, _Family]) -> list[tuple[_Collector, _Family]]:
        names: list[str] = [*self._labels, *["engine"] * self._has_engines, *["role"] * self._has_roles]

        def collector(name: str, family: _Family) -> _Collector:
            return kind(f"octavo:{name}", family.doc, [*names, *filter(None, [family.label])], registry=self.registry)

        return [(collector(name, family), family) for name, family in families.items()]

    def _replica(self, number: int) -> _Replica:
        """Return the collectors of a replica, made when they are first used."""
        if number not in self._replicas:
            engine = {"engine": str(number)} if self._has_engines else {}
            role = {"role": str(self._roles[number])} if self._has_roles else {}
            labels = self._labels | engine | role
            self._replicas[number] = _Replica(
                _children(self._gauges, labels), _children(self._counters, labels), labels
            )
        return self._replicas[number]
