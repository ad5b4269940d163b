"""A report names machine and commit, and its last line is JSON."""

from __future__ import annotations

import json

import pytest

from octavo import __version__
from octavo.cli.report import report, rounded


def test_figures_come_as_one_line_of_json(capsys: pytest.CaptureFixture[str]) -> None:
    report("probe", {"model": "m", "arguments": {"threads": 1}}, {"elapsed_s": 1.23456789})
    written = capsys.readouterr()
    line = json.loads(written.out)
    assert line["benchmark"] == "probe"
    assert line["version"] == __version__
    assert line["arguments"] == {"threads": 1}
    assert line["elapsed_s"] == 1.23457
    assert line["cores"] >= 1
    assert "elapsed_s" in written.err


def test_numbers_have_six_digits_at_any_depth() -> None:
    assert rounded({"a": [1.23456789, 2], "b": {"c": 0.000123456789}}) == {"a": [1.23457, 2], "b": {"c": 0.000123457}}
