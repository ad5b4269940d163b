"""`python -m benchmarks.draw`: reports and recordings become pictures."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.draw import main
from octavo.cli.main import main as octavo
from tests.simulate.test_replay import record_busy_run


def test_a_report_becomes_charts(tmp_path: Path) -> None:
    report, svg = tmp_path / "report.json", tmp_path / "report.svg"
    workload = ("--num-requests", "30", "--input-len", "40", "--output-len", "10", "--request-rate", "5,20")
    assert octavo(["simulate", *workload, "--output", str(report)]) == 0
    assert main([str(report), str(svg)]) == 0
    assert "30 requests, h100/llama-3.1-8b" in svg.read_text(encoding="utf-8")


def test_a_recording_becomes_rows_of_requests_and_blocks(tmp_path: Path) -> None:
    record_busy_run(tmp_path / "run", depth=2)
    assert main([str(tmp_path / "run"), str(tmp_path / "run.svg"), "--num-steps", "20"]) == 0
    assert "Blocks of the device" in (tmp_path / "run.svg").read_text(encoding="utf-8")


def test_what_cannot_be_drawn_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path / "nowhere"), str(tmp_path / "x.svg")]) == 1
    assert "nowhere" in capsys.readouterr().err
    record_busy_run(tmp_path / "run", depth=1)
    assert main([str(tmp_path / "run"), str(tmp_path / "x.svg"), "--first-step", "0"]) == 1
    assert "first_step is 0, must be at least 1" in capsys.readouterr().err
