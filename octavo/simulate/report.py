"""The report of a simulation: a summary as a table and as JSON."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import msgspec

from octavo.simulate.executor import gap_seconds
from octavo.simulate.outcome import COUNTS, Outcome, RequestRecord


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
        """Return the spread of the times between tokens that `TokenGaps` has counted."""
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

    duration_s: from the begin to the end of the last request. utilization: share of the duration in which replicas
    computed. cached_share: prompt tokens found in the prefix cache. mean_kv_usage: mean over time and replicas.
    first_error: the error of the first failed request. time_per_output_token_s: the mean of each request.
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
    num_draft_tokens: int
    num_accepted_tokens: int


class Run(NamedTuple):
    """A simulation and its summary. `offered`: the offered load in requests per second; None without a rate."""

    summary: Summary
    outcome: Outcome
    offered: float | None = None


def summarize(outcome: Outcome) -> Summary:
    """Return the figures of an outcome."""
    records, totals, num_replicas = outcome.records, outcome.totals, outcome.num_replicas
    served = [record for record in records if record.error is None]
    errors = [record.error for record in records if record.error is not None]
    duration = max((record.finished_s for record in records), default=0.0) or 1e-9
    last_arrival = max((record.arrival_s for record in records), default=0.0)
    num_prompt = sum(record.num_prompt_tokens for record in served)
    num_output = sum(record.num_output_tokens for record in served)
    samples = [sample for sample in outcome.samples if sample.time_s <= duration]
    figures: dict[str, Any] = {name: getattr(totals, name) for name in COUNTS}
    figures |= {name: Spread.of(values) for name, values in _times(served).items()}
    return Summary(
        num_requests=len(records),
        num_failed=len(errors),
        first_error=errors[0] if errors else None,
        num_replicas=num_replicas,
        duration_s=duration,
        offered_requests_per_s=len(records) / (last_arrival or duration),
        requests_per_s=len(served) / duration,
        output_tokens_per_s=num_output / duration,
        total_tokens_per_s=(num_prompt + num_output) / duration,
        time_between_tokens_s=Spread.of_gaps(totals.gaps),
        cached_share=sum(record.num_cached_tokens for record in served) / max(num_prompt, 1),
        mean_kv_usage=math.fsum(s.kv_usage for s in samples) / max(len(samples) * num_replicas, 1),
        max_kv_usage=max((sample.max_kv_usage for sample in samples), default=0.0),
        max_waiting=max((sample.num_waiting + sample.num_swapped for sample in samples), default=0),
        utilization=totals.busy_s / (duration * num_replicas),
        **figures,
    )


def _times(served: Sequence[RequestRecord]) -> dict[str, list[float]]:
    """Return the seconds of each request by the field of `Summary` with their spread."""
    token_times = []
    for each in served:
        num_more = each.num_output_tokens // each.num_sequences - 1
        if num_more > 0 and each.first_token_s is not None:
            token_times.append((each.finished_s - each.first_token_s) / num_more)
    return {
        "time_in_queue_s": [t - each.arrival_s for each in served if (t := each.first_scheduled_s) is not None],
        "time_to_first_token_s": [t - each.arrival_s for each in served if (t := each.first_token_s) is not None],
        "time_per_output_token_s": token_times,
        "latency_s": [each.finished_s - each.arrival_s for each in served],
    }


_SPREADS = {
    "time_in_queue_s": "time in queue",
    "time_to_first_token_s": "time to first token",
    "time_per_output_token_s": "time per output token",
    "time_between_tokens_s": "time between tokens",
    "latency_s": "whole request",
}


def table(run: Run) -> str:
    """Return the summary as lines of text."""
    s = run.summary
    replicas = "1 replica" if s.num_replicas == 1 else f"{s.num_replicas:,} replicas"
    refused = f", {s.num_failed:,} refused" if s.num_failed else ""
    rows = {
        "throughput": f"{s.requests_per_s:,.4g} requests/s, {s.output_tokens_per_s:,.0f} tokens/s out, "
        f"{s.total_tokens_per_s:,.0f} in all",
        "duration": f"{s.duration_s:,.4g} s in {s.num_steps:,} steps, replicas busy {s.utilization:.0%}",
        "KV cache in use": f"{s.mean_kv_usage:.1%} on average, at most {s.max_kv_usage:.1%}",
        "found in cache": f"{s.cached_share:.1%} of prompt tokens",
        "preemptions": f"{s.num_preemptions:,}; {s.num_recomputed_tokens:,} tokens computed again, "
        f"{s.num_swapped_blocks:,} blocks moved",
        "guesses": f"{s.num_draft_tokens:,} verified, {s.num_accepted_tokens:,} right",
        "waiting": f"at most {s.max_waiting:,}",
    }
    if not s.num_draft_tokens:
        del rows["guesses"]
    if not run.outcome.samples:
        del rows["KV cache in use"], rows["waiting"]
    lines = [f"{s.num_requests:,} requests on {replicas}, {s.offered_requests_per_s:,.4g} a second offered{refused}"]
    if s.first_error is not None:
        lines.append(f"  the first was refused because {s.first_error}")
    lines += ["", *(f"  {name:22}{figures}" for name, figures in rows.items()), ""]
    lines.append(f"  {'seconds':22}" + "".join(f"{name:>10}" for name in Spread.__struct_fields__))
    for name, label in _SPREADS.items():
        values = msgspec.structs.astuple(getattr(s, name))
        lines.append(f"  {label:22}" + "".join(f"{value:10.4g}" for value in values))
    return "\n".join(lines)


def to_json(run: Run) -> dict[str, Any]:
    """Return the summary, the state over time, and the 0th to 100th percentile of each request's times."""
    num_replicas = run.outcome.num_replicas
    samples = [
        msgspec.structs.asdict(each) | {"kv_usage": each.kv_usage / num_replicas} for each in run.outcome.samples
    ]
    times = _times([record for record in run.outcome.records if record.error is None])
    percentiles = {name: _percentiles(values) for name, values in times.items()}
    values: dict[str, Any] = msgspec.to_builtins(run.summary)
    return values | {"request_rate": run.offered, "over_time": samples, "percentiles": percentiles}


def _percentiles(values: list[float]) -> list[float]:
    """Return the percentiles 0 to 100 (101 values); an empty list for no values."""
    ordered = sorted(values)
    return [ordered[round(share / 100 * (len(ordered) - 1))] for share in range(101)] if ordered else []
