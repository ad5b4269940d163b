"""Charts of the report that `octavo simulate --output` writes: latency against load, cache and queues over time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.drawing.chart import Panel, Series, render

Run = Mapping[str, Any]
"""One entry of `runs` in the report."""


def report_chart(report: Mapping[str, Any]) -> str:
    """Return an SVG.

    With several rates it has latency against load, else the distribution of latencies. Below stand the cache and the
    queues of the last run over time.
    """
    runs: Sequence[Run] = report["runs"]
    last = runs[-1]
    num_replicas = last["num_replicas"]
    several = f"{num_replicas} × " if num_replicas > 1 else ""
    title = f"{last['num_requests']:,} requests, {several}{report['cost_model']['name']}"
    panels = _against_load(runs) if len(runs) > 1 else _distributions(last)
    suffix = f" at {last['request_rate']:g} requests/s" if len(runs) > 1 and last["request_rate"] is not None else ""
    usage = [_over_time(last, "mean of replicas" if num_replicas > 1 else "in use", "kv_usage", 100)]
    if num_replicas > 1:
        usage.append(_over_time(last, "fullest replica", "max_kv_usage", 100))
    queues = [_over_time(last, "running", "num_running"), _over_time(last, "waiting", "num_waiting")]
    if any(sample["num_swapped"] for sample in last["over_time"]):
        queues.append(_over_time(last, "swapped out", "num_swapped"))
    panels += [
        Panel(f"KV cache over time{suffix}", "simulated seconds", "% of blocks in use", usage, y_max=100.0),
        Panel(f"Queues over time{suffix}", "simulated seconds", "requests", queues),
    ]
    return render(title, panels)


def _over_time(run: Run, name: str, field: str, scale: float = 1) -> Series:
    return Series(name, [(sample["time_s"], scale * sample[field]) for sample in run["over_time"]])


def _against_load(runs: Sequence[Run]) -> list[Panel]:
    by_rate = sorted(
        ((run["request_rate"] or run["offered_requests_per_s"], run) for run in runs), key=lambda pair: pair[0]
    )

    def spreads(field: str, scale: float) -> list[Series]:
        return [
            Series(name, [(rate, scale * run[field][name]) for rate, run in by_rate]) for name in ("p50", "p90", "p99")
        ]

    def shares(**fields: str) -> list[Series]:
        return [
            Series(name.replace("_", " "), [(rate, 100 * run[field]) for rate, run in by_rate])
            for name, field in fields.items()
        ]

    label = "requests a second offered"
    first, token = spreads("time_to_first_token_s", 1), spreads("time_per_output_token_s", 1e3)
    wanted = [(rate, rate * run["output_tokens_per_s"] / max(run["requests_per_s"], 1e-9)) for rate, run in by_rate]
    produced = [
        Series("output", [(rate, run["output_tokens_per_s"]) for rate, run in by_rate]),
        Series("asked for", wanted),
    ]
    usage = shares(busy="utilization", KV_blocks_in_use="mean_kv_usage", found_in_cache="cached_share")
    return [
        Panel("Time to first token against load", label, "seconds", first, has_marks=True, is_wide=True),
        Panel("Time per output token against load", label, "milliseconds", token, has_marks=True, is_wide=True),
        Panel("Throughput against load", label, "tokens per second", produced, has_marks=True),
        Panel("Replicas against load, on average", label, "%", usage, y_max=100.0, has_marks=True),
    ]


def _distributions(run: Run) -> list[Panel]:
    def series(name: str, field: str, scale: float = 1) -> Series:
        return Series(name, [(scale * value, share) for share, value in enumerate(run["percentiles"][field])])

    whole = [series("to the first token", "time_to_first_token_s"), series("whole", "latency_s")]
    token = [series("mean of a request", "time_per_output_token_s", 1e3)]
    label = "% of requests"
    return [
        Panel("How long requests take", "seconds", label, whole, y_max=100.0),
        Panel("Time between tokens", "milliseconds", label, token, y_max=100.0),
    ]
