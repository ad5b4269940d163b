"""What a simulation showed: a summary as a table and as JSON."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from itertools import accumulate
from typing import Any, NamedTuple

import msgspec

from octavo.simulate.cluster import Outcome, RequestRecord
from octavo.simulate.executor import gap_seconds


class Spread(msgspec.Struct, frozen=True):
    """Mean and percentiles (nearest rank) of some values; zeros when there are none."""

    mean: float
    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        ordered = sorted(values)
        if not ordered:
            return cls(0.0, 0.0, 0.0, 0.0)
        p50, p90, p99 = (ordered[math.ceil(share * len(ordered)) - 1] for share in (0.5, 0.9, 0.99))
        return cls(math.fsum(ordered) / len(ordered), p50, p90, p99)

    @classmethod
    def of_gaps(cls, counts: Mapping[int, int]) -> Spread:
        """Of the times between tokens that `TokenGaps` has counted."""
        if not counts:
            return cls.of(())
        ordered, total = sorted(counts), sum(counts.values())
        sums = list(accumulate(counts[key] for key in ordered))
        p50, p90, p99 = (
            gap_seconds(ordered[bisect_left(sums, math.ceil(share * total))]) for share in (0.5, 0.9, 0.99)
        )
        return cls(math.fsum(gap_seconds(key) * count for key, count in counts.items()) / total, p50, p90, p99)


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """One simulation in numbers. Times are seconds of simulated time, shares between 0 and 1.

    duration_s: from the begin to the end of the last request. utilization: share of that time in which replicas
    computed. cached_share: prompt tokens found in the prefix cache. mean_kv_usage: over time and replicas.
    first_error: why the first of the requests that failed did so. time_per_output_token_s: the mean of each request.
    time_between_tokens_s: of all tokens but each sequence's first.
    """

    num_requests: int
    num_failed: int
    first_error: str | None
    num_replicas: int
    duration_s: float
    offered_requests_per_s: float
    requests_per_s: float
    output_tokens_per_s: float
    total_tokens_per_s: float
    time_in_queue_s: Spread
    time_to_first_token_s: Spread
    time_per_output_token_s: Spread
    time_between_tokens_s: Spread
    latency_s: Spread
    cached_share: float
    mean_kv_usage: float
    max_kv_usage: float
    max_waiting: int
    utilization: float
    num_steps: int
    num_preemptions: int
    num_swapped_blocks: int
    num_recomputed_tokens: int


class Run(NamedTuple):
    """A simulation and what is said about it. `offered`: requests a second that were asked for, if a rate was."""

    summary: Summary
    outcome: Outcome
    offered: float | None = None


def summarize(outcome: Outcome) -> Summary:
    """The numbers of an outcome."""
    served = [record for record in outcome.records if record.error is None]
    duration = max((record.finished_s for record in outcome.records), default=0.0) or 1e-9
    last_arrival = max((record.arrival_s for record in outcome.records), default=0.0)
    num_prompt = sum(record.num_prompt_tokens for record in served)
    num_output = sum(record.num_output_tokens for record in served)
    samples = [sample for sample in outcome.samples if sample.time_s <= duration]
    return Summary(
        num_requests=len(outcome.records),
        num_failed=len(outcome.records) - len(served),
        first_error=next((record.error for record in outcome.records if record.error is not None), None),
        num_replicas=outcome.num_replicas,
        duration_s=duration,
        offered_requests_per_s=len(outcome.records) / (last_arrival or duration),
        requests_per_s=len(served) / duration,
        output_tokens_per_s=num_output / duration,
        total_tokens_per_s=(num_prompt + num_output) / duration,
        time_in_queue_s=Spread.of(first - r.arrival_s for r in served if (first := r.first_scheduled_s) is not None),
        time_to_first_token_s=Spread.of(_first_token_seconds(served)),
        time_per_output_token_s=Spread.of(_token_seconds(served)),
        time_between_tokens_s=Spread.of_gaps(outcome.gaps),
        latency_s=Spread.of(record.finished_s - record.arrival_s for record in served),
        cached_share=sum(record.num_cached_tokens for record in served) / max(num_prompt, 1),
        mean_kv_usage=math.fsum(s.kv_usage for s in samples) / max(len(samples) * outcome.num_replicas, 1),
        max_kv_usage=max((sample.max_kv_usage for sample in samples), default=0.0),
        max_waiting=max((sample.num_waiting + sample.num_swapped for sample in samples), default=0),
        utilization=outcome.busy_s / (duration * outcome.num_replicas),
        num_steps=outcome.num_steps,
        num_preemptions=outcome.num_preemptions,
        num_swapped_blocks=outcome.num_swapped_blocks,
        num_recomputed_tokens=outcome.num_recomputed_tokens,
    )


def _first_token_seconds(records: Iterable[RequestRecord]) -> list[float]:
    return [first - record.arrival_s for record in records if (first := record.first_token_s) is not None]


def _token_seconds(records: Iterable[RequestRecord]) -> list[float]:
    """Seconds between tokens of a sequence, for each request with more than one."""
    found = []
    for record in records:
        num_more = record.num_output_tokens // record.num_sequences - 1
        if num_more > 0 and record.first_token_s is not None:
            found.append((record.finished_s - record.first_token_s) / num_more)
    return found


_SPREADS = {
    "time_in_queue_s": "time in queue",
    "time_to_first_token_s": "time to first token",
    "time_per_output_token_s": "time per output token",
    "time_between_tokens_s": "time between tokens",
    "latency_s": "whole request",
}


def table(run: Run) -> str:
    """The summary for people."""
    s, has_samples = run.summary, bool(run.outcome.samples)
    lines = [
        f"{s.num_requests:,} requests on {_replicas(s.num_replicas)}, {s.offered_requests_per_s:,.4g} a second offered"
        f"{f', {s.num_failed:,} refused' if s.num_failed else ''}",
        *([f"  the first was refused because {s.first_error}"] if s.first_error is not None else []),
        "",
        f"  {'throughput':22}{s.requests_per_s:,.4g} requests/s, {s.output_tokens_per_s:,.0f} tokens/s out, "
        f"{s.total_tokens_per_s:,.0f} in all",
        f"  {'duration':22}{s.duration_s:,.4g} s in {s.num_steps:,} steps, replicas busy {s.utilization:.0%}",
        *(
            [f"  {'KV cache in use':22}{s.mean_kv_usage:.1%} on average, at most {s.max_kv_usage:.1%}"]
            if has_samples
            else []
        ),
        f"  {'found in cache':22}{s.cached_share:.1%} of prompt tokens",
        f"  {'preemptions':22}{s.num_preemptions:,}; {s.num_recomputed_tokens:,} tokens computed again, "
        f"{s.num_swapped_blocks:,} blocks moved",
        *([f"  {'waiting':22}at most {s.max_waiting:,}"] if has_samples else []),
        "",
        f"  {'seconds':22}" + "".join(f"{name:>10}" for name in ("mean", "p50", "p90", "p99")),
    ]
    for name, label in _SPREADS.items():
        spread = getattr(s, name)
        lines.append(f"  {label:22}" + "".join(f"{value:10.4g}" for value in msgspec.structs.astuple(spread)))
    return "\n".join(lines)


def _replicas(count: int) -> str:
    return "1 replica" if count == 1 else f"{count:,} replicas"


def to_json(run: Run) -> dict[str, Any]:
    """Return the summary, the state over time, and the 0th to 100th percentile of each request's times."""
    samples = [
        {
            "time_s": sample.time_s,
            "num_running": sample.num_running,
            "num_waiting": sample.num_waiting,
            "num_swapped": sample.num_swapped,
            "kv_usage": sample.kv_usage / run.outcome.num_replicas,
            "max_kv_usage": sample.max_kv_usage,
        }
        for sample in run.outcome.samples
    ]
    served = [record for record in run.outcome.records if record.error is None]
    percentiles = {
        "time_to_first_token_s": _percentiles(_first_token_seconds(served)),
        "time_per_output_token_s": _percentiles(_token_seconds(served)),
        "latency_s": _percentiles([record.finished_s - record.arrival_s for record in served]),
    }
    values: dict[str, Any] = msgspec.to_builtins(run.summary)
    return values | {"request_rate": run.offered, "over_time": samples, "percentiles": percentiles}


def _percentiles(values: list[float]) -> list[float]:
    """Return 101 values; none for an empty list."""
    ordered = sorted(values)
    return [ordered[round(share / 100 * (len(ordered) - 1))] for share in range(101)] if ordered else []
