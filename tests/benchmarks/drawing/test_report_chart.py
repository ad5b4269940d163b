"""Charts of the report of a simulation."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from typing import Any

from benchmarks.drawing.report_chart import report_chart
from octavo.simulate.report import Run, summarize, to_json
from tests.simulate.test_report import outcome


def report(*rates: float | None) -> dict[str, Any]:
    runs = [to_json(Run(summarize(outcome()), outcome(), rate)) for rate in rates]
    return {"cost_model": {"name": "A & B"}, "elapsed_s": 1.0, "runs": runs}


def texts(svg: str) -> list[str]:
    return [element.text or "" for element in ET.fromstring(svg).iter() if element.tag.endswith("text")]


def test_one_run_is_drawn_as_distributions_and_over_time() -> None:
    shown = texts(report_chart(report(None)))
    assert "5 requests, 2 × A & B" in shown
    for text in ("How long requests take", "KV cache over time", "Queues over time", "% of blocks in use", "waiting"):
        assert text in shown


def test_several_runs_are_drawn_against_load() -> None:
    shown = texts(report_chart(report(1.0, 4.0)))
    for text in (
        "Time to first token against load",
        "requests a second offered",
        "p90",
        "Throughput against load",
        "asked for",
        "KV blocks in use",
        "swapped out",
        "Queues over time at 4 requests/s",
    ):
        assert text in shown
