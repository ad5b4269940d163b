"""Launches of kernels by their names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="the kernels of the device cuda need Triton")

import triton.language as tl

import octavo.devices.cuda
from octavo.devices.cuda import runtime


class KeptLaunches:
    """A function of Triton that keeps what it is launched with."""

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def keep(*arguments: Any, **constants: Any) -> None:
            self.launched = grid, arguments, constants

        return keep


@pytest.mark.parametrize(
    "options", [{}, {"enable_fp_fusion": False, "num_warps": 8, "num_stages": 2}], ids=["pinned", "of a kernel's own"]
)
def test_every_launch_says_what_decides_bits(monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]) -> None:
    kept = KeptLaunches()
    monkeypatch.setattr(runtime, "triton_function", lambda kernel: {"rows.rms_norm": kept}[kernel])
    runtime.launch_by_triton("rows.rms_norm", (2, 3), "x", 4, DIM=8, TYPE="bfloat16", **options)
    pinned = {"enable_fp_fusion": True, "num_warps": 4, "num_stages": 3}
    expected = {"DIM": 8, "TYPE": tl.bfloat16, **pinned, **options}
    assert kept.launched == ((2, 3), ("x", 4), expected)


def test_kernels_are_launched_in_one_place() -> None:
    folder = Path(octavo.devices.cuda.__file__).parent
    others = [path for path in folder.rglob("*.py") if "kernels" not in path.parts and path.name != "runtime.py"]
    assert len(others) > 10
    assert [path.name for path in others if "cuda.kernels" in path.read_text()] == []
