"""Operators are compared with the reference one by one: one that fails does not hide the others."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import fields, is_dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="the kernels of the device cuda need Triton")

from benchmarks.gpu import parts
from benchmarks.gpu.parts import moved
from octavo.devices.cuda.runtime import CudaRuntime
from octavo.ops.registry import operators


def tensors_in(value: Any) -> list[Tensor]:
    """Return the tensors in an argument of an operator."""
    if isinstance(value, Tensor):
        return [value]
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, tuple) else vars_of(value)
    return [each for part in parts for each in tensors_in(part)]


def vars_of(value: Any) -> Iterable[Any]:
    return [getattr(value, each.name) for each in fields(value)] if is_dataclass(value) else ()


def test_without_a_gpu_no_part_runs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["parts"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        parts.main()
    assert "finds no GPU; run this on a machine with a GPU of NVIDIA" in capsys.readouterr().err


def test_all_tensors_of_all_examples_are_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tensor, "cuda", lambda tensor: tensor.to("meta"))
    for operator in operators().values():
        for arguments in operator.examples(torch.float32):
            there = tensors_in(tuple(moved(each) for each in arguments))
            assert len(there) == len(tensors_in(arguments)) > 0, operator.name
            assert all(each.is_meta for each in there), operator.name


@pytest.fixture
def on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "moved", lambda value: value)


@pytest.mark.usefixtures("on_the_host")
def test_all_shares_of_an_operators_examples_agree_with_the_reference() -> None:
    assert parts.merged([parts.checked((name, torch.float32, 0)) for name in ("rms_norm", "rotary")])["of_allowed"] <= 1
    found = [parts.checked(("prepare_quantized", torch.float32, part)) for part in range(parts.SHARES)]
    assert parts.merged(found)["of_allowed"] <= 1


@pytest.mark.usefixtures("on_the_host")
def test_a_kernel_that_fails_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def launch(kernel: str, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
        raise RuntimeError(f"no room for {kernel}")

    monkeypatch.setattr(parts, "INVARIANT", CudaRuntime(is_invariant=True, launch=launch))
    failed = parts.checked(("rms_norm", torch.bfloat16, 0))
    assert parts.merged([0.5, failed, 0.25]) == {"failed": "RuntimeError: no room for rows.rms_norm"}


def test_a_part_with_a_line_that_says_failed_has_failed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The GPU may be of no use to its process, so the next part runs in a new one."""
    lines = [{"us": 1.0}, {"us": 0.0, "failed": "no luck"}, {"us": 2.0}]
    monkeypatch.setitem(parts.PARTS, "bits", lambda: iter(lines))
    assert not parts.printed("bits")
    *found, last = map(json.loads, capsys.readouterr().out.splitlines())
    assert (found, last["part"], last["failed"]) == (lines, "bits", "1 of its lines, the first: no luck")
