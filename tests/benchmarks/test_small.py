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
        expected = "elementwise" if name.endswith("_and_mul") else name.removeprefix("add_").removesuffix("_codes")
        expected = "rotate_and_store" if name == "rotary" else expected
        assert [(kernel.partition(".")[2], num_warps) for kernel, num_warps in launched] == [(expected, 8)]
    assert len(made) == 8
