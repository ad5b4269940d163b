"""A load that was measured beside its simulation."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from octavo.simulate.report import Summary

_FIGURES: Final = (
    ("output tokens/s", "output_tokens_per_s", None, 1.0),
    ("time to first token, mean, ms", "time_to_first_token_s", "mean", 1e3),
    ("time to first token, p99, ms", "time_to_first_token_s", "p99", 1e3),
    ("time per output token, mean, ms", "time_per_output_token_s", "mean", 1e3),
    ("whole request, mean, ms", "latency_s", "mean", 1e3),
    ("found in cache, % of prompts", "cached_share", None, 1e2),
    ("preemptions", "num_preemptions", None, 1.0),
)
"""Label, field of `Summary`, what of its spread, and the factor to the label's unit."""


class Comparison(NamedTuple):
    """One load: several measurements of it, and what the simulation of it says."""

    load: str
    measured: Sequence[Summary]
    predicted: Summary

    def rows(self) -> list[tuple[str, float, float]]:
        """Label, the median of the measurements, and the prediction."""
        return [
            (
                label,
                statistics.median(_figure(summary, field, part, scale) for summary in self.measured),
                _figure(self.predicted, field, part, scale),
            )
            for label, field, part, scale in _FIGURES
        ]

    @property
    def throughput_error(self) -> float:
        """(predicted - measured) / measured output tokens per second."""
        _, measured, predicted = self.rows()[0]
        return predicted / measured - 1


def _figure(summary: Summary, field: str, part: str | None, scale: float) -> float:
    value = getattr(summary, field)
    return scale * float(value if part is None else getattr(value, part))


def table(comparisons: Sequence[Comparison]) -> str:
    """All loads, for people."""
    lines = [f"{'':36}{'measured':>12}{'predicted':>12}{'error':>9}"]
    for comparison in comparisons:
        summary = comparison.predicted
        lines.append(f"{comparison.load}: {summary.num_requests:,} requests")
        for label, measured, predicted in comparison.rows():
            error = f"{predicted / measured - 1:+9.1%}" if measured > 0 and "preemptions" not in label else ""
            lines.append(f"  {label:34}{measured:12,.4g}{predicted:12,.4g}{error}")
    worst = max(comparisons, key=lambda each: abs(each.throughput_error))
    lines.append(f"throughput is predicted within {abs(worst.throughput_error):.1%} ({worst.load})")
    return "\n".join(lines)


def to_json(comparisons: Sequence[Comparison]) -> dict[str, Any]:
    """The same as plain values: load → figure → [measured, predicted]."""
    return {each.load: {label: list(values) for label, *values in each.rows()} for each in comparisons}
