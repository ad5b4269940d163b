"""What an engine in process has counted, under vLLM's names and as objects that a program reads."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import msgspec

from octavo.core.messages import SchedulerStats

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

    from octavo.engine.output.request_counts import RequestCounts


class _Named(msgspec.Struct, frozen=True, kw_only=True):
    """name: vLLM's, such as vllm:num_requests_running. labels: by their names."""

    name: str
    labels: dict[str, str]


class Counter(_Named, frozen=True, kw_only=True):
    """A number that only grows."""

    value: int


class Gauge(_Named, frozen=True, kw_only=True):
    """A number of the present state."""

    value: float


class Vector(_Named, frozen=True, kw_only=True):
    """A number for each position, which only grows."""

    values: list[int]


class Histogram(_Named, frozen=True, kw_only=True):
    """How many values were up to each limit, and in all, and their sum. buckets: by the limit as text, the last one
    +Inf."""

    count: int
    sum: float
    buckets: dict[str, int]


CountedMetric = Counter | Gauge | Histogram | Vector


def read_metrics(model_name: str, stats: SchedulerStats, requests: RequestCounts) -> list[CountedMetric]:
    """Return what the stats of an engine have and what is counted of its requests, in the order in which a server shows
    it."""
    from octavo.engine.output.metric_views import under_vllm_names
    from octavo.engine.output.metrics import Metrics

    metrics = Metrics(model_name, requests=requests)
    metrics.observe_stats(stats)
    return list(_read(under_vllm_names(metrics.registry.collect())))


def _read(metrics: Iterable[Metric]) -> Iterator[CountedMetric]:
    for metric in metrics:
        places = [sample for sample in metric.samples if "position" in sample.labels]
        if places:
            labels = {name: value for name, value in places[0].labels.items() if name != "position"}
            ordered = sorted(places, key=lambda sample: int(sample.labels["position"]))
            yield Vector(name=metric.name, labels=labels, values=[int(sample.value) for sample in ordered])
        elif metric.type == "histogram":
            yield _histogram(metric)
        else:
            for sample in metric.samples:
                if metric.type == "counter":
                    yield Counter(name=metric.name, labels=sample.labels, value=int(sample.value))
                else:
                    yield Gauge(name=metric.name, labels=sample.labels, value=sample.value)


def _histogram(metric: Metric) -> Histogram:
    """Return a histogram of Prometheus' library, which has the samples of one engine."""
    buckets = {sample.labels["le"]: int(sample.value) for sample in metric.samples if "le" in sample.labels}
    [whole] = [sample for sample in metric.samples if sample.name.endswith("_sum")]
    return Histogram(name=metric.name, labels=whole.labels, count=buckets["+Inf"], sum=whole.value, buckets=buckets)
