"""The times of small kernels are those of one launch each."""

from __future__ import annotations

from typing import Any

from benchmarks.gpu.small import calls, with_warps


def test_each_call_launches_its_kernel_once_with_the_warps_that_are_asked_for() -> None:
    launched: list[tuple[str, int]] = []

    def launch(kernel: str, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
        launched.append((kernel, constants["num_warps"]))

    made = calls(3, 1024, with_warps(8, launch), device="cpu")
    for name, call in made.items():
        launched.clear()
        call()
        kernel = name.removeprefix("add_")
        room = "attention" if name.startswith("store") else "rows"
        assert launched == [(f"{room}.{kernel}", 8)], name
    assert len(made) == 7
