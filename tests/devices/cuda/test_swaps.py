"""Swaps beside what computes: in any order that the streams allow, each reads what it should."""

from __future__ import annotations

import threading

import pytest
import torch

pytest.importorskip("triton", reason="the kernels of the device cuda need Triton")

from octavo import LLM
from octavo.attention.backend import CacheLayout
from octavo.config.schema import DeviceConfig
from octavo.core.step import BlockCopy, BlockOps
from octavo.devices import DEVICES
from octavo.devices.cuda import swaps
from octavo.devices.cuda.swaps import Swaps
from octavo.devices.device import DeviceMemory
from octavo.errors import ConfigError
from octavo.platform import Platform
from octavo.worker.cache_engine import Arena, CacheEngine
from octavo.worker.worker import Worker
from tests.devices.cuda.interpreted import NAME, InterpretedCuda
from tests.devices.cuda.streams import KeptStream, finish


def copies(*pairs: tuple[int, int]) -> list[BlockCopy]:
    return [BlockCopy(source, target) for source, target in pairs]


@pytest.mark.parametrize("is_side_first", [False, True], ids=["swaps late", "swaps early"])
def test_blocks_are_not_overwritten_before_they_are_swapped_out_nor_read_before_they_are_swapped_in(
    is_side_first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(swaps, "STAGING_BYTES", 2 * 3 * 4)  # two blocks at once
    compute, side = KeptStream(), KeptStream()
    mover = Swaps(compute, side, torch.device("cpu"), 3 * 4)
    blocks, host, seen = torch.zeros(6, 3), torch.zeros(6, 3), torch.zeros(5, 3)
    compute.run(lambda: blocks.copy_(torch.arange(6.0)[:, None].expand(6, 3)))
    mover.move_out(blocks, host, copies((1, 3), (2, 4), (3, 5), (4, 1), (5, 2)))
    compute.run(lambda: blocks.fill_(-1))  # others have the blocks from here on
    compute.run(lambda: seen.copy_(blocks[:5]))
    mover.move_in(host, blocks, copies((3, 0), (4, 1), (5, 2), (1, 3), (2, 4)))
    compute.run(lambda: seen.add_(blocks[:5], alpha=10))
    mover.move_out(blocks, host, copies((5, 3)))
    finish([side, compute] if is_side_first else [compute, side])
    assert seen[:, 0].tolist() == [9, 19, 29, 39, 49]
    assert host[1:, 0].tolist() == [4, 5, -1, 2, 3]


def test_a_larger_block_than_the_buffer_has_a_buffer_of_its_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(swaps, "STAGING_BYTES", 1)
    compute, side = KeptStream(), KeptStream()
    blocks, host = torch.ones(2, 7), torch.zeros(2, 7)
    Swaps(compute, side, torch.device("cpu"), 28).move_out(blocks, host, copies((1, 1)))
    finish([compute, side])
    assert host.sum() == 7


def test_swap_space_that_the_host_has_no_room_for_is_refused_by_number(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = DeviceMemory(1 << 34, 1 << 34, "device", is_host=False, host_available=1 << 30, most_kv_bytes=None)
    assert memory.share(2).host_available == 1 << 29
    monkeypatch.setitem(DEVICES, "cuda", NAME)
    monkeypatch.setattr(InterpretedCuda, "memory", lambda _: memory)
    with pytest.raises(
        ConfigError, match=r"swap_space of .* has to be pinned .* available is 1.* GiB; lower swap_space"
    ):
        LLM("octavo-tiny", device="cuda", dtype="float32", swap_space=2)


def test_swap_space_is_allocated_at_start_and_swaps_are_not_timed() -> None:
    device = InterpretedCuda(DeviceConfig(device="cuda", threads=1), Platform.detect(), "asked for")
    engine = CacheEngine([Arena([0, 1], CacheLayout((2, 9, 2, 4, 3), torch.float32), 4)], device)
    engine.wait_for_swap_space()
    assert engine._host_tiers[0] is not None
    for cache in engine.caches:
        cache += torch.arange(9).view(1, 9, 1, 1, 1)
    assert engine.apply(BlockOps(swap_outs=copies((3, 1), (4, 4)))) == 0
    for cache in engine.caches:
        cache[:, 3:5] = 0
    assert engine.apply(BlockOps(swap_ins=copies((4, 6), (1, 7)))) == 0
    assert [cache[0, 6:8, 0, 0, 0].tolist() for cache in engine.caches] == [[4, 3], [4, 3]]


@pytest.mark.parametrize("order", [1, -1])
def test_the_largest_blocks_of_all_cache_groups_are_swapped(order: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(swaps, "STAGING_BYTES", 8)
    device = InterpretedCuda(DeviceConfig(device="cuda", threads=1), Platform.detect(), "asked for")
    sizes = [3, 5][::order]  # as of keys and values, and of states
    arenas = [Arena([layer], CacheLayout((1, 4, size), torch.float32), 2) for layer, size in enumerate(sizes)]
    engine = CacheEngine(arenas, device)
    for cache in engine.caches:
        cache += torch.arange(4).view(1, 4, 1)
    engine.apply(BlockOps(swap_outs=[BlockCopy(1 + group, 1, group) for group in range(2)]))
    engine.apply(BlockOps(swap_ins=[BlockCopy(1, 3, group) for group in range(2)]))
    assert [cache[0, 3].tolist() for cache in engine.caches] == [[1.0] * sizes[0], [2.0] * sizes[1]]


def test_swap_space_is_pinned_until_everything_else_is_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    pinned, is_made = [], threading.Event()
    make, pin = Worker._make_runner, InterpretedCuda._pinned

    def after_all_else(self: InterpretedCuda, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        pinned.append(is_made.wait(timeout=60))
        return pin(self, shape, dtype)

    def made(self: Worker) -> None:
        make(self)
        is_made.set()

    monkeypatch.setitem(DEVICES, "cuda", NAME)
    monkeypatch.setattr(InterpretedCuda, "_pinned", after_all_else)
    monkeypatch.setattr(Worker, "_make_runner", made)
    with LLM("octavo-tiny", device="cuda", dtype="float32", swap_space=0.01):
        assert pinned == [True]


def test_memory_that_cannot_be_pinned_is_refused_by_number(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> torch.Tensor:
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setitem(DEVICES, "cuda", NAME)
    monkeypatch.setattr(InterpretedCuda, "_pinned", refuse)
    with pytest.raises(ConfigError, match="swap_space of [0-9,]+ bytes cannot be pinned .* CUDA error: out of memory"):
        LLM("octavo-tiny", device="cuda", dtype="float32", swap_space=0.01)
