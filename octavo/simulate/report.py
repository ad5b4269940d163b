"""What a simulation showed: a summary as a table and as JSON, and pictures of latency, cache and queues."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import msgspec

from octavo.simulate.chart import Panel, Series, render
from octavo.simulate.cluster import Outcome, RequestRecord, Sample
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
    """The summary and the state over time."""
    values: dict[str, Any] = msgspec.to_builtins(run.summary)
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
    return values | {"request_rate": run.offered, "over_time": samples}


def picture(title: str, runs: Sequence[Run]) -> str:
    """SVG: latency against load where there are several rates, else how latencies are spread; and over the time of the
    last run its cache and queues."""
    last = runs[-1]
    panels = _against_load(runs) if len(runs) > 1 else _distributions(last)
    suffix = f" at {last.offered:g} requests/s" if len(runs) > 1 and last.offered is not None else ""
    samples, num_replicas = last.outcome.samples, last.outcome.num_replicas
    swapped = [(s.time_s, s.num_swapped) for s in samples]
    in_use = [(s.time_s, 100 * s.kv_usage / num_replicas) for s in samples]
    panels.append(
        Panel(
            f"KV cache over time{suffix}",
            "simulated seconds",
            "% of blocks in use",
            [
                Series("mean of replicas" if num_replicas > 1 else "in use", in_use),
                *([Series("fullest replica", _fullest(samples))] if num_replicas > 1 else []),
            ],
            y_max=100.0,
        )
    )
    panels.append(
        Panel(
            f"Queues over time{suffix}",
            "simulated seconds",
            "requests",
            [
                Series("running", [(s.time_s, s.num_running) for s in samples]),
                Series("waiting", [(s.time_s, s.num_waiting) for s in samples]),
                *([Series("swapped out", swapped)] if any(count for _, count in swapped) else []),
            ],
        )
    )
    return render(title, panels)


def _fullest(samples: Sequence[Sample]) -> list[tuple[float, float]]:
    return [(sample.time_s, 100 * sample.max_kv_usage) for sample in samples]


def _against_load(runs: Sequence[Run]) -> list[Panel]:
    by_rate = sorted(
        (((run.offered or run.summary.offered_requests_per_s), run.summary) for run in runs), key=lambda pair: pair[0]
    )

    def spreads(field: str, scale: float) -> list[Series]:
        return [
            Series(name, [(rate, scale * getattr(getattr(summary, field), name)) for rate, summary in by_rate])
            for name in ("p50", "p90", "p99")
        ]

    def shares(**fields: str) -> list[Series]:
        return [
            Series(name.replace("_", " "), [(rate, 100 * getattr(summary, field)) for rate, summary in by_rate])
            for name, field in fields.items()
        ]

    label = "requests a second offered"
    first, token = spreads("time_to_first_token_s", 1), spreads("time_per_output_token_s", 1e3)
    produced = [
        Series("output", [(rate, s.output_tokens_per_s) for rate, s in by_rate]),
        Series(
            "asked for", [(rate, rate * s.output_tokens_per_s / max(s.requests_per_s, 1e-9)) for rate, s in by_rate]
        ),
    ]
    usage = shares(busy="utilization", KV_blocks_in_use="mean_kv_usage", found_in_cache="cached_share")
    return [
        Panel("Time to first token against load", label, "seconds", first, has_marks=True, is_wide=True),
        Panel("Time per output token against load", label, "milliseconds", token, has_marks=True, is_wide=True),
        Panel("Throughput against load", label, "tokens per second", produced, has_marks=True),
        Panel("Replicas against load, on average", label, "%", usage, y_max=100.0, has_marks=True),
    ]


def _distributions(run: Run) -> list[Panel]:
    served = [record for record in run.outcome.records if record.error is None]
    label = "% of requests"
    whole = [record.finished_s - record.arrival_s for record in served]
    return [
        Panel(
            "How long requests take",
            "seconds",
            label,
            [
                Series("to the first token", _cumulated(_first_token_seconds(served))),
                Series("whole", _cumulated(whole)),
            ],
            y_max=100.0,
        ),
        Panel(
            "Time between tokens",
            "milliseconds",
            label,
            [Series("mean of a request", _cumulated([1e3 * each for each in _token_seconds(served)]))],
            y_max=100.0,
        ),
    ]


def _cumulated(values: Iterable[float], num_points: int = 200) -> list[tuple[float, float]]:
    """Points (value, % of values that are not larger)."""
    ordered = sorted(values)
    if not ordered:
        return []
    places = sorted({round(i * (len(ordered) - 1) / num_points) for i in range(num_points + 1)})
    return [(ordered[place], 100 * (place + 1) / len(ordered)) for place in places]
