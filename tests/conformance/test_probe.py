"""The measured ceilings: every kind of arithmetic that a level has, every byte read, at any number of threads."""

from __future__ import annotations

import pytest

from benchmarks.kernels.ceilings import ARITHMETIC, measure
from tests.conformance.runtimes import LEVELS, runtime

HAS = {
    "avx2": {"float32", "int8"},
    "avx512": {"float32", "int8"},
    "avx512_bf16": {"float32", "int8", "bfloat16"},
    "amx": set(ARITHMETIC),
    "amx_emulated": {"float32", "int8", "bfloat16"},
}


@pytest.mark.parametrize("level", LEVELS)
def test_a_level_computes_what_its_instructions_can(level: str) -> None:
    for name, kind in ARITHMETIC.items():
        done = runtime(level).cpu.probe_compute(kind, 100_000, 1)
        assert (done >= 100_000) == (name in HAS[level])
        assert runtime(level, 2).cpu.probe_compute(kind, 100_000, 2) == 2 * done


@pytest.mark.skipif(not LEVELS, reason="the compiled kernels cannot run on this machine")
def test_ceilings_are_rates_of_one_thread_and_of_all() -> None:
    ceilings = measure(runtime(LEVELS[0], 2))
    assert ceilings.dram.of(1) == ceilings.dram.one > 1
    assert ceilings.dram.of(2) == ceilings.dram.all > 1
    assert set(ceilings.compute_tops) == HAS[LEVELS[0]]
    assert "read dram" in ceilings.table()


def test_without_kernels_there_is_nothing_to_measure() -> None:
    with pytest.raises(RuntimeError, match="build octavo's compiled library"):
        measure(None)
