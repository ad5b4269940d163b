"""What an engine in process has counted, under vLLM's names and as objects that a program reads."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import msgspec

from octavo.core.messages import SchedulerStats

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric


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


def read_metrics(model_name: str, stats: SchedulerStats) -> list[Counter | Gauge | Vector]:
    """Return what the stats of an engine have, in the order in which a server shows it."""
    from octavo.engine.metric_views import under_vllm_names
    from octavo.engine.metrics import Metrics

    metrics = Metrics(model_name)
    metrics.observe_stats(stats)
    return list(_read(under_vllm_names(metrics.of_cores())))


def _read(metrics: Iterable[Metric]) -> Iterator[Counter | Gauge | Vector]:
    for metric in metrics:
        places = [sample for sample in metric.samples if "position" in sample.labels]
        if places:
            labels = {name: value for name, value in places[0].labels.items() if name != "position"}
            ordered = sorted(places, key=lambda sample: int(sample.labels["position"]))
            yield Vector(name=metric.name, labels=labels, values=[int(sample.value) for sample in ordered])
            continue
        for sample in metric.samples:
            if metric.type == "counter":
                yield Counter(name=metric.name, labels=sample.labels, value=int(sample.value))
            else:
                yield Gauge(name=metric.name, labels=sample.labels, value=sample.value)
