"""Engines with binaries are compared with those of Triton, where there are binaries."""

from __future__ import annotations

from types import TracebackType
from typing import Any

import pytest

pytest.importorskip("triton", reason="the kernels of the device cuda need Triton")

from benchmarks.gpu import binaries
from octavo.devices.cuda import device
from octavo.devices.cuda.cubins import Call, CubinLauncher
from octavo.devices.cuda.runtime import Launcher, launch_by_triton


class Engine:
    """An engine that opens a launcher, and answers as its launches do."""

    def __init__(self, model: str, **options: Any) -> None:
        launcher = device.open_launcher(90, 228 << 10, lambda: pytest.fail("no driver"), is_invariant=False)
        self.text = type(launcher).__name__

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: TracebackType | type | Exception | None) -> None:
        """Do nothing."""


def lines_with(launcher: Launcher, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    monkeypatch.setattr(binaries, "LLM", Engine)
    monkeypatch.setattr(binaries, "answers", lambda llm, prompts, params: [llm.text])
    monkeypatch.setattr(device, "open_launcher", lambda *_, **__: launcher)
    return [*binaries.binaries()]


def test_answers_and_kernels_without_a_binary_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    launcher = object.__new__(CubinLauncher)
    launcher.missing = {Call("rows.rms_norm", (), frozenset()), Call("rows.rms_norm", ("1",), frozenset())}
    found = lines_with(launcher, monkeypatch)
    assert [each["launched by"] for each in found] == ["binaries"] * 2 + ["Triton"] * 2
    assert [each["without a binary"] for each in found] == [["rows.rms_norm"]] * 2 + [[]] * 2
    assert [each["as_the_first"] for each in found] == [True, True, False, False]


def test_without_an_archive_nothing_is_said_of_binaries(monkeypatch: pytest.MonkeyPatch) -> None:
    first, *others = lines_with(launch_by_triton, monkeypatch)
    assert "no archive fits" in first["not run"]
    assert [each["as_the_first"] for each in others] == [True, True]
