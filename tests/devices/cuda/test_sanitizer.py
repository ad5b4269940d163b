"""The sanitizer of kernels finds faults that were planted, and none in kernels that are right."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="the kernels of the device cuda need Triton")

import triton
import triton.language as tl

from tests.devices.cuda.sanitizer import Report, sanitized


def report_of(kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> Report:
    with sanitized() as report:
        kernel[grid](*arguments, **constants)
    return report


def faults_of(kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> list[str]:
    """Return what is found, without names and lines."""
    return sorted(each.partition(": ")[2] for each in report_of(kernel, grid, *arguments, **constants).faults)


@triton.jit
def _copy(x, out, num, BLOCK: tl.constexpr, IS_MASKED: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at, mask=at < num if IS_MASKED else None), mask=at < num)


def test_reads_outside_of_tensors_are_found() -> None:
    memory, out = torch.arange(24.0), torch.zeros(12)
    assert faults_of(_copy, (2,), memory[:12], out, 12, BLOCK=8, IS_MASKED=True) == []
    assert torch.equal(out, memory[:12])
    report = report_of(_copy, (2,), memory[:12], out, 12, BLOCK=8, IS_MASKED=False)
    [(what, where)] = report.faults.items()
    assert what.endswith("load outside of all tensors")
    assert where == "48 bytes from the start of x in program (1, 0, 0)"
    assert (report.counts["launches"], report.counts["programs"]) == (1, 2)


@triton.jit
def _write(out, IS_EQUAL: tl.constexpr):
    tl.store(out, 1 if IS_EQUAL else tl.program_id(0))


def test_writes_of_several_programs_to_one_place_are_found() -> None:
    out = torch.zeros(1, dtype=torch.int32)
    race, order = "race of programs, store in test_sanitizer.py", "results change with the order of programs"
    found = faults_of(_write, (3,), out, IS_EQUAL=False)
    assert [each.partition(":")[0] for each in found] == [race, order]
    equal = report_of(_write, (3,), out, IS_EQUAL=True)
    assert not equal.faults
    assert len(equal.benign) == 1


@triton.jit
def _sum_of_last(
    x, parts, arrived, out, COUNT: tl.constexpr, SEM: tl.constexpr, HAS_BARRIER: tl.constexpr, BLOCK: tl.constexpr
):
    block = tl.arange(0, BLOCK)
    tl.store(parts + tl.program_id(0) * BLOCK + block, tl.load(x + tl.program_id(0) * BLOCK + block))
    if HAS_BARRIER:
        tl.debug_barrier()
    if tl.atomic_add(arrived, 1, sem=SEM) != COUNT - 1:
        return
    total = tl.zeros([BLOCK], tl.float32)
    for number in range(COUNT):
        total += tl.load(parts + number * BLOCK + block)
    tl.store(out + block, total)


@pytest.mark.parametrize(
    ("sem", "has_barrier", "faults"),
    [
        ("acq_rel", True, []),
        ("acq_rel", False, ["no barrier between a store and the atomic that publishes it", "no barrier between store"]),
        ("relaxed", True, ["race of programs, store"]),
    ],
)
def test_the_last_program_reads_what_barrier_and_atomic_publish(sem: str, has_barrier: bool, faults: list[str]) -> None:
    x, out = torch.arange(12.0), torch.zeros(4)
    arrived, parts = torch.zeros(1, dtype=torch.int32), torch.zeros(12)
    options = {"COUNT": 3, "SEM": sem, "HAS_BARRIER": has_barrier, "BLOCK": 4}
    found = faults_of(_sum_of_last, (3,), x, parts, arrived, out, **options)
    assert [each.partition(" in ")[0] for each in found] == faults
    assert torch.equal(out, x.view(3, 4).sum(0))


@triton.jit
def _turn(x, IS_TURNED: tl.constexpr, HAS_BARRIER: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    values = tl.load(x + (BLOCK - 1 - at if IS_TURNED else at))
    if HAS_BARRIER:
        tl.debug_barrier()
    tl.store(x + at, values + 1)


@triton.jit
def _advance(x):
    tl.store(x, tl.load(x) + 1)
    tl.store(x + 1, tl.load(x))


def test_threads_of_a_program_are_apart_without_a_barrier() -> None:
    x = torch.arange(512.0)
    assert faults_of(_turn, (1,), x, IS_TURNED=False, HAS_BARRIER=False, BLOCK=512) == []
    assert faults_of(_turn, (1,), x, IS_TURNED=True, HAS_BARRIER=True, BLOCK=512) == []
    [found] = faults_of(_turn, (1,), x, IS_TURNED=True, HAS_BARRIER=False, BLOCK=512)
    assert found.startswith("no barrier between load")
    assert faults_of(_turn, (1,), x, IS_TURNED=False, HAS_BARRIER=True, BLOCK=8) == []
    [found] = faults_of(_turn, (1,), x, IS_TURNED=False, HAS_BARRIER=False, BLOCK=8)  # which several threads have read
    assert found.startswith("no barrier between load")
    found, other = faults_of(_advance, (1,), x)
    assert (found.startswith("no barrier between load"), other.startswith("no barrier between store")) == (True, True)


@triton.jit
def _far(x, row, stride, IS_WIDE: tl.constexpr):
    place = row.to(tl.int64) * stride if IS_WIDE else row * stride
    tl.store(x, place.to(tl.float32))


def test_places_that_leave_int32_are_found() -> None:
    x = torch.zeros(1)
    assert faults_of(_far, (1,), x, 1 << 16, 1 << 15, IS_WIDE=True) == []
    assert x.item() == float(1 << 31)
    assert faults_of(_far, (1,), x, 1 << 16, 1 << 15, IS_WIDE=False) == ["a result leaves int32"]


def test_memory_that_no_one_has_written_shows() -> None:
    with sanitized():
        made = torch.empty(3), torch.empty_like(torch.zeros(3)), torch.zeros(0).new_empty(3)
        numbers = torch.empty(3, dtype=torch.int32)
    assert all(each.isnan().all() for each in made)
    assert (numbers == (1 << 31) - 1).all()
