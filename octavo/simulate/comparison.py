"""Compares a measured load with its simulation."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

from octavo.simulate.cost_model import Check
from octavo.simulate.report import Summary

_FIGURES: Final = (
    ("output tokens/s", "output_tokens_per_s", None, 1.0),
    ("time to first token, mean, ms", "time_to_first_token_s", "mean", 1e3),
    ("time to first token, p99, ms", "time_to_first_token_s", "p99", 1e3),
    ("time per output token, mean, ms", "time_per_output_token_s", "mean", 1e3),
    ("between tokens, p99, ms", "time_between_tokens_s", "p99", 1e3),
    ("whole request, mean, ms", "latency_s", "mean", 1e3),
    ("found in cache, % of prompts", "cached_share", None, 1e2),
    ("preemptions", "num_preemptions", None, 1.0),
)
"""Label, field of `Summary`, field of its spread, and the factor to the label's unit."""

_SMALLEST: Final = 0.1
"""A relative error of a smaller figure is not shown."""
_UNDISTURBED: Final = 0.95
"""A process that had a processor for at least this share of its busy time counts as undisturbed."""


class Measured(NamedTuple):
    """The summary of a load on a real engine. processor_share: share of its busy time in which the engine had a
    processor; None if busy time was measured as processor time.
    """

    summary: Summary
    processor_share: float | None = None


class Comparison(NamedTuple):
    """The summaries of one load, measured and simulated."""

    load: str
    measured: Measured
    predicted: Summary

    @classmethod
    def of(cls, load: str, measured: Sequence[Measured], predicted: Summary) -> Comparison:
        """Compare with the measurement that has the shortest request times: other programs on a machine only lengthen
        them."""
        return cls(load, min(measured, key=lambda each: each.summary.latency_s.mean), predicted)

    def rows(self) -> list[tuple[str, float, float]]:
        """Return label, measured and predicted value of each figure."""
        return [
            (label, _figure(self.measured.summary, *how), _figure(self.predicted, *how)) for label, *how in _FIGURES
        ]

    @property
    def throughput_error(self) -> float:
        """Return (predicted - measured) / measured output tokens per second."""
        return self.predicted.output_tokens_per_s / self.measured.summary.output_tokens_per_s - 1


def check_of(comparison: Comparison) -> Check:
    """Return the errors for a load that was held out of the fit, as a cost model stores them."""
    measured, predicted = comparison.measured.summary, comparison.predicted

    def error(of: Callable[[Summary], float]) -> float:
        return of(predicted) / of(measured) - 1 if of(measured) > 0 else 0.0

    return Check(
        load=comparison.load,
        **_traits(predicted),
        throughput_error=error(lambda each: each.output_tokens_per_s),
        first_token_error=error(lambda each: each.time_to_first_token_s.mean),
        token_time_error=error(lambda each: each.time_per_output_token_s.mean),
    )


def expected_error(checks: Sequence[Check], predicted: Summary) -> str:
    """Return a sentence on the errors for the held-out load that is most like this one; empty where there is none."""
    if not checks or not predicted.requests_per_s:
        return ""
    traits = _traits(predicted)
    nearest = min(checks, key=lambda check: _distance(check, traits))
    return (
        f"the most similar load that was measured and not fitted to ({nearest.load}: {nearest.input_len:.0f} → "
        f"{nearest.output_len:.0f} tokens, engine busy {nearest.utilization:.0%}) was predicted with errors of "
        f"{nearest.throughput_error:+.1%} (throughput), {nearest.first_token_error:+.1%} (time to first token) and "
        f"{nearest.token_time_error:+.1%} (time per output token)"
    )


def _traits(summary: Summary) -> dict[str, float]:
    return {
        "input_len": (summary.total_tokens_per_s - summary.output_tokens_per_s) / summary.requests_per_s,
        "output_len": summary.output_tokens_per_s / summary.requests_per_s,
        "utilization": summary.utilization,
        "queued_share": summary.time_in_queue_s.mean / summary.latency_s.mean,
    }


def _distance(check: Check, traits: dict[str, float]) -> float:
    """Return the distance of two loads; lengths that differ by a factor of 8 count as much as an idle and a busy
    engine."""
    return (
        abs(math.log(traits["input_len"] / check.input_len, 8))
        + abs(math.log(traits["output_len"] / check.output_len, 8))
        + abs(traits["utilization"] - check.utilization)
        + abs(traits["queued_share"] - check.queued_share)
    )


def _figure(summary: Summary, field: str, part: str | None, scale: float) -> float:
    value = getattr(summary, field)
    return scale * float(value if part is None else getattr(value, part))


def table(comparisons: Sequence[Comparison]) -> str:
    """Return a text table of all loads."""
    lines = [f"{'':36}{'measured':>12}{'predicted':>12}{'error':>9}"]
    for comparison in comparisons:
        summary = comparison.predicted
        share = comparison.measured.processor_share
        had = f", had a processor {share:.0%} of the time" if share is not None else ""
        lines.append(f"{comparison.load}: {summary.num_requests:,} requests{had}")
        for label, measured, predicted in comparison.rows():
            error = f"{predicted / measured - 1:+9.1%}" if measured > _SMALLEST else ""
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
    """Return load → figure → [measured, predicted]."""
    return {
        each.load: {label: list(values) for label, *values in each.rows()}
        | {"processor_share": each.measured.processor_share}
        for each in comparisons
    }
