"""The figures of a load on a server, with the definitions and names of vLLM's bench client."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec
import numpy as np

from octavo.cli.terminal import histogram
from octavo.config.explain import render_table
from octavo.errors import ConfigError

METRICS: Final = {
    "ttft": "time to first token",
    "tpot": "time per output token",
    "itl": "inter-token latency",
    "e2el": "end-to-end latency",
}


class Answer(msgspec.Struct, frozen=True):
    """What was measured of a request, in seconds. error: why it failed.

    itl: the times between its events. prompt_len, output_len: tokens.
    """

    prompt_len: int = 0
    output_len: int = 0
    ttft: float = 0.0
    itl: list[float] = []
    e2el: float = 0.0
    error: str | None = None

    @property
    def tpot(self) -> float:
        """Return the mean time of a token after the first; 0 where there is none."""
        return (self.e2el - self.ttft) / (self.output_len - 1) if self.output_len > 1 else 0.0


def figures(
    answers: Sequence[Answer], seconds: float, percentiles: Sequence[float], limits: Mapping[str, float]
) -> dict[str, Any]:
    """Return the figures of a load that took so many seconds. limits: in ms, of requests that are good."""
    served = [each for each in answers if each.error is None]
    num_prompt, num_output = sum(each.prompt_len for each in served), sum(each.output_len for each in served)
    good = [each for each in served if all(1e3 * getattr(each, name) <= limit for name, limit in limits.items())]
    result: dict[str, Any] = {
        "duration": seconds,
        "completed": len(served),
        "failed": len(answers) - len(served),
        "total_input_tokens": num_prompt,
        "total_output_tokens": num_output,
        "request_throughput": len(served) / seconds,
        "request_goodput": len(good) / seconds if limits else None,
        "output_throughput": num_output / seconds,
        "total_token_throughput": (num_prompt + num_output) / seconds,
    }
    for name in METRICS:
        values = values_of(name, served) or [0.0]
        result[f"mean_{name}_ms"] = statistics.fmean(values)
        result[f"median_{name}_ms"] = statistics.median(values)
        result[f"std_{name}_ms"] = statistics.pstdev(values)
        result |= {f"p{share:g}_{name}_ms": float(np.percentile(values, share)) for share in percentiles}
    return result


def values_of(name: str, answers: Sequence[Answer]) -> list[float]:
    """Return the values of a metric in ms."""
    if name == "itl":
        return [1e3 * gap for each in answers for gap in each.itl]
    return [1e3 * getattr(each, name) for each in answers if name != "tpot" or each.output_len > 1]


def percentiles_of(text: str) -> list[float]:
    """Return [50.0, 99.0] for "50,99". Raises ConfigError."""
    try:
        found = [float(part) for part in text.split(",")]
    except ValueError:
        found = [-1.0]
    if not all(0 <= share <= 100 for share in found):
        raise ConfigError(f"metric_percentiles is {text!r}, expected numbers from 0 to 100 between commas")
    return found


def limits_of(texts: Sequence[str]) -> dict[str, float]:
    """Return {"ttft": 200.0} for ["ttft:200"]. Raises ConfigError."""
    limits = {}
    for text in " ".join(texts).split():
        name, _, value = text.partition(":")
        try:
            limits[name] = float(value)
        except ValueError:
            limits[name] = -1.0
        if name not in ("ttft", "tpot", "e2el") or not limits[name] >= 0:
            raise ConfigError(f"goodput has {text!r}, expected ttft, tpot or e2el with ms, as in ttft:200")
    return limits


def table(
    result: Mapping[str, Any], shown: Sequence[str], percentiles: Sequence[float], answers: Sequence[Answer]
) -> str:
    """Return the figures as a table, with a histogram of each metric, from its least value to its largest."""
    failed = f", {result['failed']:,} failed" if result["failed"] else ""
    good = f", {result['request_goodput']:,.2f} good" if result["request_goodput"] is not None else ""
    head = (
        f"{result['completed']:,} requests in {result['duration']:,.1f} s{failed}\n"
        f"  {result['request_throughput']:,.2f} requests/s{good}, "
        f"{result['output_throughput']:,.1f} generated tokens/s, {result['total_token_throughput']:,.1f} in all\n"
    )
    rows = [("", "mean", "median", *(f"p{share:g}" for share in percentiles), "spread")]
    served = [each for each in answers if each.error is None]
    for name in shown:
        keys = ("mean", "median", *(f"p{share:g}" for share in percentiles))
        numbers = [f"{result[f'{key}_{name}_ms']:,.1f} ms" for key in keys]
        rows.append((METRICS[name], *numbers, histogram(values_of(name, served))))
    return head + render_table(rows)
