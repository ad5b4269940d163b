"""Engines side by side: one line per figure, one column per engine, and how many times better the first one is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple


class Line(NamedTuple):
    """A figure that is shown: in which unit, as how many of what is in the results, and whether more is better."""

    figure: str
    title: str
    more_is_better: bool = False
    scale: float = 1.0


LINES: dict[str, tuple[Line, ...]] = {
    "A": (
        Line("ttft_last", "first token ms", scale=1e3),
        Line("decode_tps", "decode tokens/s", more_is_better=True),
        Line("step_ms", "step ms"),
    ),
    "B": (
        Line("wall", "wall s"),
        Line("out_tps", "output tokens/s", more_is_better=True),
        Line("decode_tps", "decode tokens/s", more_is_better=True),
    ),
    "C1": (Line("prefill_tps", "prefill tokens/s", more_is_better=True),),
    "C8": (Line("prefill_tps", "prefill tokens/s", more_is_better=True),),
    "D": (
        Line("wall", "wall s"),
        Line("decode_tps", "decode tokens/s", more_is_better=True),
        Line("step_ms", "step ms"),
    ),
    "E": (Line("wall", "wall s, cold"), Line("warm_prefix_wall", "wall s, warm")),
}
"""What is shown of each workload; the line of JSON has everything."""

START = (
    Line("cold_start_s", "cold start s"),
    Line("rss_after_load_mb", "RSS MB, loaded"),
    Line("peak_rss_mb", "RSS MB, peak"),
)


def ratios(results: Mapping[str, Any]) -> dict[str, dict[str, dict[str, float]]]:
    """Engine → workload → figure → how many times better the first engine is, by the medians."""
    ours, *others = results
    found: dict[str, dict[str, dict[str, float]]] = {}
    for other in others:
        found[other] = {}
        for name, workload in results[ours]["workloads"].items():
            theirs = results[other]["workloads"][name]
            if "error" not in theirs:
                found[other][name] = {
                    line.figure: _better(line, workload[line.figure]["med"], theirs[line.figure]["med"])
                    for line in LINES[name]
                    if line.figure in workload and line.figure in theirs
                }
    return found


def table(results: Mapping[str, Any]) -> str:
    """Text for people. The first engine is the one that the others are compared with."""
    ours, *others = results
    better = ratios(results)
    rows = [["", "", *results, *(f"over {other}" for other in others)]]
    for name in results[ours]["workloads"]:
        for line in LINES[name]:
            cells = [_cell(line, result["workloads"][name]) for result in results.values()]
            known = [better[other].get(name, {}).get(line.figure) for other in others]
            rows.append([name, line.title, *cells, *map(_times, known)])
    for line in START:
        values = [result[line.figure] for result in results.values()]
        quotients = [_better(line, values[0], each) for each in values[1:]]
        rows.append(["start", line.title, *map(_number, values), *map(_times, quotients)])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(_padded, row, widths, range(len(row)))).rstrip() for row in rows)


def _better(line: Line, ours: float, theirs: float) -> float:
    return ours / theirs if line.more_is_better else theirs / ours


def _cell(line: Line, workload: Mapping[str, Any]) -> str:
    if "error" in workload:
        return "failed"
    return _number(workload[line.figure]["med"] * line.scale) if line.figure in workload else "–"


def _number(value: float) -> str:
    """Four significant digits, without an exponent."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:#.4g}"


def _times(ratio: float | None) -> str:
    return "–" if ratio is None else f"{ratio:.2f}×"


def _padded(text: str, width: int, column: int) -> str:
    return text.ljust(width) if column < 2 else text.rjust(width)
