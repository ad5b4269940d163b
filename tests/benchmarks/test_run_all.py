"""Parts of a run on a GPU: what earlier ones print is kept, and later ones run, whatever becomes of one."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from benchmarks.gpu.kept import kept
from benchmarks.gpu.run_all import main, run_all

PROGRAM = """
import json, os, sys, time
names = sys.argv[2:] or ["good", "fails", "dies", "hangs", "last"]
print(json.dumps({"parts": names}), flush=True)
for name in names:
    print(json.dumps({"found by": name}), flush=True)
    print("a library's message", flush=True)
    if name == "dies":
        os._exit(9)
    if name == "hangs":
        time.sleep(60)
    print(json.dumps({"part": name, **({"failed": "no luck"} if name == "fails" else {})}), flush=True)
    if name == "fails":
        sys.exit(1)
"""


def ran(
    capsys: pytest.CaptureFixture[str], parts: Sequence[str], seconds: float = 50.0, part_seconds: float = 50.0
) -> tuple[dict[str, str], list[Any]]:
    failed = run_all(parts, seconds, part_seconds, [sys.executable, "-c", PROGRAM])
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines() if line.startswith("{")]
    return failed, [each["found by"] for each in lines if "found by" in each]


def test_parts_after_one_that_fails_or_ends_the_process_run_in_a_new_one(capsys: pytest.CaptureFixture[str]) -> None:
    failed, found = ran(capsys, ["good", "fails", "dies", "last"])
    assert failed == {"fails": "no luck", "dies": "its process ended with status 9"}
    assert found == ["good", "fails", "dies", "last"]


def test_without_names_all_parts_run_and_one_that_hangs_is_stopped(capsys: pytest.CaptureFixture[str]) -> None:
    failed, found = ran(capsys, [], part_seconds=4.0)
    assert failed.pop("hangs") == "stopped after 4 s"
    assert [*failed] == ["fails", "dies"]
    assert found == ["good", "fails", "dies", "hangs", "last"]


def test_what_has_no_time_is_named_and_what_was_found_is_kept(capsys: pytest.CaptureFixture[str]) -> None:
    failed, found = ran(capsys, ["good", "hangs"], seconds=3.0)
    assert failed == {"hangs": "stopped after 3 s"}
    assert found == ["good", "hangs"]


def test_parts_that_nobody_knows_have_not_begun(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["run_all", "--parts", "unknown"])
    monkeypatch.setattr("benchmarks.gpu.run_all.COMMAND", (sys.executable, "-c", "raise SystemExit(2)"))
    assert main() == 1
    assert json.loads(capsys.readouterr().out) == {"failed": {"unknown": "not begun: its process ended with status 2"}}


def test_one_that_hangs_leaves_an_equal_share_of_the_time_to_the_others(capsys: pytest.CaptureFixture[str]) -> None:
    failed, found = ran(capsys, ["good", "hangs", "last"], seconds=8.0)
    assert [*failed] == ["hangs"]
    assert failed["hangs"] in ("stopped after 3 s", "stopped after 4 s")
    assert found == ["good", "hangs", "last"]


def test_lines_before_and_after_one_that_fails_are_kept(capsys: pytest.CaptureFixture[str]) -> None:
    def found() -> Iterator[dict[str, Any]]:
        yield {"us": 1.0}
        raise RuntimeError("out of shared memory")

    assert [*kept({"tile": "plain"}, found), *kept({}, lambda: [{"us": 2.0}])] == [
        {"tile": "plain", "us": 1.0},
        {"tile": "plain", "failed": "RuntimeError: out of shared memory"},
        {"us": 2.0},
    ]
    assert "in found" in capsys.readouterr().err
