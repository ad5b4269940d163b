"""Operators are compared with the reference one by one: one that fails does not hide the others."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="the kernels of the device cuda need Triton")

from benchmarks.gpu import parts
from octavo.devices.cuda.runtime import CudaRuntime


@pytest.fixture(autouse=True)
def _on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "moved", lambda value: value)


def test_all_shares_of_an_operators_examples_agree_with_the_reference() -> None:
    assert parts.merged([parts.checked((name, torch.float32, 0)) for name in ("rms_norm", "rotary")])["of_allowed"] <= 1
    found = [parts.checked(("prepare_quantized", torch.float32, part)) for part in range(parts.SHARES)]
    assert parts.merged(found)["of_allowed"] <= 1


def test_a_kernel_that_fails_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def launch(kernel: str, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
        raise RuntimeError(f"no room for {kernel}")

    monkeypatch.setattr(parts, "INVARIANT", CudaRuntime(is_invariant=True, launch=launch))
    failed = parts.checked(("rms_norm", torch.bfloat16, 0))
    assert parts.merged([0.5, failed, 0.25]) == {"failed": "RuntimeError: no room for rows.rms_norm"}
