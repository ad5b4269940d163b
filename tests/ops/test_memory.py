from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest
import torch

from octavo.ops.memory import Scratch, WeightArena, zeroed
from octavo.ops.pages import LARGE_PAGE_BYTES, Pages
from tests.fakes.resident import resident_bytes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("shape", [(3, 5, 7), (3, 1001, 2003)])
def test_it_reads_as_zeros_and_takes_what_is_written(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    tensor = zeroed(shape, dtype)
    assert torch.equal(tensor, torch.zeros(shape, dtype=dtype))
    tensor[1] = 2
    assert int((tensor == 2).sum()) == shape[1] * shape[2]
    assert tensor.is_contiguous()


def test_nothing_is_allowed() -> None:
    assert zeroed((0, 4), torch.float32).shape == (0, 4)


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux's account of a process's memory")
def test_it_takes_no_memory_until_it_is_written() -> None:
    def resident_bytes() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

    before = resident_bytes()
    tensor = zeroed((1 << 30,), torch.int8)
    assert resident_bytes() - before < 16 << 20
    tensor[: 64 << 20] = 1
    assert 48 << 20 < resident_bytes() - before < 80 << 20


def test_an_arena_hands_out_zeros_side_by_side_and_lets_go_of_what_is_gone() -> None:
    arena = WeightArena()
    first, second = arena.zeroed((3, 5), torch.float32), arena.zeroed((7,), torch.bfloat16)
    assert second.data_ptr() - first.data_ptr() == 64
    first.fill_(1)
    assert not second.any()
    large = arena.zeroed((80 << 20,), torch.int8)
    assert large.data_ptr() % 64 == 0
    assert not large[:: 1 << 20].any()
    assert arena.zeroed((0, 4), torch.float32).shape == (0, 4)
    assert torch.equal(first, torch.ones(3, 5))


def test_scratch_is_used_again_by_the_next_that_fits() -> None:
    scratch = Scratch()
    first = scratch.take((2048, 1024), torch.float32)
    second = scratch.take((2048, 1024), torch.bfloat16)
    places = first.data_ptr(), second.data_ptr()
    first.fill_(1)
    second.fill_(2)
    assert float(first.sum()) == first.numel()
    for tensor in (first, second):
        scratch.give_back(tensor)
    assert scratch.take((1024, 2048), torch.bfloat16).data_ptr() == places[1]
    assert scratch.take((1024, 1024), torch.float32).data_ptr() == places[0]
    assert scratch.take((1024, 1024), torch.float32).data_ptr() not in places


def test_scratch_takes_back_only_what_it_gave() -> None:
    scratch = Scratch()
    strange = torch.ones(2048, 1024)
    scratch.give_back(strange)
    assert scratch.take((2048, 1024), torch.float32).data_ptr() != strange.data_ptr()


def test_scratch_that_is_cleared_leaves_what_is_in_use() -> None:
    scratch = Scratch()
    kept = scratch.take((2048, 1024), torch.float32).fill_(3)
    scratch.clear()
    scratch.take((2048, 1024), torch.float32).fill_(4)
    assert float(kept.min()) == float(kept.max()) == 3


def test_an_arena_begins_with_pages_that_were_fetched_before() -> None:
    arena, pages = WeightArena(), Pages(8 << 20)
    arena.begin_with(pages)
    first = arena.zeroed((3 << 20,), torch.int8)
    too_large = arena.zeroed((6 << 20,), torch.int8)
    second = arena.zeroed((1 << 20,), torch.int8)
    assert first.data_ptr() % LARGE_PAGE_BYTES == 0
    assert second.data_ptr() == first.data_ptr() + first.nbytes
    assert too_large.untyped_storage().data_ptr() != first.untyped_storage().data_ptr()
    first.fill_(1)
    second.fill_(2)
    arena.trim()
    assert [int(part.sum()) for part in (first, second, too_large)] == [3 << 20, 2 << 20, 0]
    assert arena.zeroed((1 << 20,), torch.int8).untyped_storage().data_ptr() != first.untyped_storage().data_ptr()


@pytest.mark.skipif(sys.platform != "linux", reason="other systems cannot fetch pages ahead")
def test_pages_are_fetched_ahead_and_given_back() -> None:
    pages = Pages(64 << 20)
    pages.populate(40 << 20)
    deadline = time.monotonic() + 60.0
    while pages.populated_bytes < 40 << 20 and time.monotonic() < deadline:
        time.sleep(0.001)
    memory = torch.frombuffer(pages.memory, dtype=torch.uint8, count=pages.num_bytes, offset=pages.start)
    assert pages.populated_bytes == 40 << 20
    assert 40 << 20 <= resident_bytes(memory) < 48 << 20
    memory.fill_(1)
    pages.release_from(3 << 20)
    assert resident_bytes(memory) <= 4 << 20
    assert int(memory.sum()) == 4 << 20
