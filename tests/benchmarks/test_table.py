"""Engines side by side."""

from __future__ import annotations

from typing import Any

from benchmarks.table import LINES, ratios, table
from benchmarks.workloads import WORKLOADS, summarize


def result(*runs: dict[str, float], cold_start_s: float) -> dict[str, Any]:
    workload = {"runs": list(runs), **summarize(runs)} if runs else {"error": "it ran out of memory"}
    start = {"cold_start_s": cold_start_s, "rss_after_load_mb": 100, "peak_rss_mb": 2000}
    return {**start, "workloads": {"A": workload}}


OURS = result(
    *({"ttft_last": t, "decode_tps": d} for t, d in ((0.25, 20.0), (0.5, 40.0), (1.0, 10.0))), cold_start_s=2.0
)
THEIRS = result(
    *({"ttft_last": t, "decode_tps": d} for t, d in ((1.0, 10.0), (0.25, 10.0), (1.5, 10.0))), cold_start_s=5.0
)


def test_ratios_are_those_of_the_medians_and_above_one_where_the_first_engine_is_better() -> None:
    assert ratios({"octavo": OURS, "other": THEIRS}) == {"other": {"A": {"ttft_last": 2.0, "decode_tps": 2.0}}}


def test_table_has_a_line_for_each_figure_and_a_column_for_each_engine() -> None:
    lines = table({"octavo": OURS, "other": THEIRS}).splitlines()
    assert lines[0].split() == ["octavo", "other", "over", "other"]
    assert lines[1].split() == ["A", "first", "token", "ms", "500.0", "1,000", "2.00×"]
    assert lines[2].split() == ["A", "decode", "tokens/s", "20.00", "10.00", "2.00×"]
    assert lines[3].split() == ["A", "step", "ms", "–", "–", "–"]
    assert lines[4].split() == ["start", "cold", "start", "s", "2.000", "5.000", "2.50×"]
    assert lines[6].split() == ["start", "RSS", "MB,", "peak", "2,000", "2,000", "1.00×"]


def test_an_engine_that_failed_has_no_ratio() -> None:
    results = {"octavo": OURS, "other": result(cold_start_s=5.0)}
    assert ratios(results) == {"other": {}}
    assert table(results).splitlines()[1].split() == ["A", "first", "token", "ms", "500.0", "failed", "–"]


def test_every_workload_has_lines() -> None:
    assert set(LINES) == set(WORKLOADS)
