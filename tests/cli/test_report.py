"""A report names machine and commit, and its last line is JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from octavo import __version__
from octavo.cli.main import main
from octavo.cli.report import check_file, report, rounded
from octavo.errors import ConfigError


def test_figures_come_as_one_line_of_json(capsys: pytest.CaptureFixture[str]) -> None:
    report("probe", {"model": "m", "arguments": {"threads": 1}}, {"elapsed_s": 1.23456789})
    written = capsys.readouterr()
    line = json.loads(written.out)
    assert (line["benchmark"], line["version"]) == ("probe", __version__)
    assert (line["arguments"], line["elapsed_s"]) == ({"threads": 1}, 1.23457)
    assert line["cores"] >= 1
    assert "elapsed_s" in written.err


def test_a_file_that_could_not_be_written_is_refused_before_the_work(tmp_path: Path) -> None:
    (tmp_path / "there").write_text("")
    for place in (None, str(tmp_path / "there"), str(tmp_path / "new"), "/dev/null"):
        check_file("output", place)
    for wrong in (tmp_path, tmp_path / "nowhere" / "new", tmp_path / "there" / "new"):
        with pytest.raises(ConfigError, match="output is .*, which cannot be written"):
            check_file("output", str(wrong))


@pytest.mark.parametrize(
    "command",
    [
        "bench calibrate --output /nowhere/x",
        "bench calibrate --engine-config /nowhere/x",
        "bench validate --output /nowhere/x",
        "simulate --save-trace /nowhere/x",
        "bench serve --save-result --result-dir /nowhere",
    ],
)
def test_no_measurement_begins_that_cannot_be_written(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(command.split()) == 1
    captured = capsys.readouterr()
    assert "which cannot be written; name a file" in captured.err
    assert captured.err.count("\n") == 1


def test_numbers_have_six_digits_at_any_depth() -> None:
    assert rounded({"a": [1.23456789, 2], "b": {"c": 0.000123456789}}) == {"a": [1.23457, 2], "b": {"c": 0.000123457}}
