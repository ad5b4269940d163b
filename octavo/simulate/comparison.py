"""A load that was measured beside its simulation."""

from __future__ import annotations

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

_NEXT_TO_NOTHING: Final = 0.1
_UNDISTURBED: Final = 0.95
"""A process that has a processor for this share of its time was hardly disturbed."""


class Measured(NamedTuple):
    """A load on a real engine. processor_share: of the time in which it computed, that in which it had a processor;
    other programs had the rest. None where only the former was counted."""

    summary: Summary
    processor_share: float | None = None


class Comparison(NamedTuple):
    """One load as it was measured and as its simulation says."""

    load: str
    measured: Measured
    predicted: Summary

    @classmethod
    def of(cls, load: str, measured: Sequence[Measured], predicted: Summary) -> Comparison:
        """Of several measurements the one with the shortest requests counts: what else runs on a machine only adds."""
        return cls(load, min(measured, key=lambda each: each.summary.latency_s.mean), predicted)

    def rows(self) -> list[tuple[str, float, float]]:
        """Label, measured and predicted value."""
        return [
            (label, _figure(self.measured.summary, *how), _figure(self.predicted, *how)) for label, *how in _FIGURES
        ]

    @property
    def throughput_error(self) -> float:
        """(predicted - measured) / measured output tokens per second."""
        return self.predicted.output_tokens_per_s / self.measured.summary.output_tokens_per_s - 1


def _figure(summary: Summary, field: str, part: str | None, scale: float) -> float:
    value = getattr(summary, field)
    return scale * float(value if part is None else getattr(value, part))


def table(comparisons: Sequence[Comparison]) -> str:
    """All loads, for people."""
    lines = [f"{'':36}{'measured':>12}{'predicted':>12}{'error':>9}"]
    for comparison in comparisons:
        summary = comparison.predicted
        share = comparison.measured.processor_share
        had = f", had a processor {share:.0%} of the time" if share is not None else ""
        lines.append(f"{comparison.load}: {summary.num_requests:,} requests{had}")
        for label, measured, predicted in comparison.rows():
            # of next to nothing no error is large
            error = f"{predicted / measured - 1:+9.1%}" if measured > _NEXT_TO_NOTHING else ""
            lines.append(f"  {label:34}{measured:12,.4g}{predicted:12,.4g}{error}")
    worst = max(comparisons, key=lambda each: abs(each.throughput_error))
    lines.append(f"throughput is predicted within {abs(worst.throughput_error):.1%} (worst: {worst.load})")
    share = min((s for each in comparisons if (s := each.measured.processor_share) is not None), default=1.0)
    if share < _UNDISTURBED:
        lines.append(
            f"other programs had the processor for up to {1 - share:.0%} of the measured time, so the engine was "
            "slower than it is by itself; repeat this when the machine is idle"
        )
    return "\n".join(lines)


def to_json(comparisons: Sequence[Comparison]) -> dict[str, Any]:
    """The same as plain values: load → figure → [measured, predicted]."""
    return {
        each.load: {label: list(values) for label, *values in each.rows()}
        | {"processor_share": each.measured.processor_share}
        for each in comparisons
    }
