"""The metrics of several servers of the same cores as one: what each counts of its requests is added up."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

Counts = list[tuple[str, dict[str, str], float]]
"""Samples of one server: names, labels, values."""


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
