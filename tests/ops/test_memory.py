from __future__ import annotations

from pathlib import Path

import pytest
import torch

from octavo.ops.memory import Arena, zeroed


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
    arena = Arena()
    first, second = arena.zeroed((3, 5), torch.float32), arena.zeroed((7,), torch.bfloat16)
    assert second.data_ptr() - first.data_ptr() == 64
    first.fill_(1)
    assert not second.any()
    large = arena.zeroed((80 << 20,), torch.int8)
    assert large.data_ptr() % 64 == 0
    assert not large[:: 1 << 20].any()
    assert arena.zeroed((0, 4), torch.float32).shape == (0, 4)
    assert torch.equal(first, torch.ones(3, 5))
