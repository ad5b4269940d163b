from __future__ import annotations

import sys

import pytest
import torch

from octavo.attention.backend import CacheLayout
from octavo.config.schema import DeviceConfig
from octavo.core.step import BlockCopy, BlockOps
from octavo.devices.device import Device, open_device
from octavo.ops.pages import LARGE_PAGE_BYTES
from octavo.worker.cache_engine import Arena, CacheEngine
from tests.conformance.runtimes import LEVELS, PLATFORM, REFERENCE
from tests.fakes.resident import resident_bytes

KERNELS = [False, True] if LEVELS else [False]
pytestmark = pytest.mark.parametrize("kernels", KERNELS, ids=["torch", "kernels"][: len(KERNELS)])


def device(kernels: bool) -> Device:
    return open_device(DeviceConfig(threads=1), PLATFORM) if kernels else REFERENCE


def layout(num_blocks: int) -> CacheLayout:
    return CacheLayout((2, num_blocks, 2, 4, 3), torch.float32)


def make_engine(kernels: bool, num_host_blocks: int = 4) -> CacheEngine:
    """Two layers; every value of block `i` is `i`, plus 100 in the second layer."""
    engine = CacheEngine([Arena([0, 1], layout(9), num_host_blocks)], device(kernels))
    for layer, cache in enumerate(engine.caches):
        cache += torch.arange(9).view(1, 9, 1, 1, 1) + 100 * layer
    return engine


def contents(engine: CacheEngine) -> list[int]:
    """Value of each block of the first layer, after seeing that the block and the second layer agree with it."""
    first, second = engine.caches
    assert torch.equal(first + 100, second)
    values = first[0, :, 0, 0, 0]
    assert torch.equal(first, values.view(1, -1, 1, 1, 1).expand_as(first))
    return values.int().tolist()


def copies(*pairs: tuple[int, int]) -> list[BlockCopy]:
    return [BlockCopy(source, target) for source, target in pairs]


def test_copies_move_whole_blocks_of_all_layers(kernels: bool) -> None:
    engine = make_engine(kernels)
    engine.apply(BlockOps(copies=copies((1, 5), (1, 6), (2, 7))))
    assert contents(engine) == [0, 1, 2, 3, 4, 1, 1, 2, 8]


def test_copies_take_effect_in_their_order(kernels: bool) -> None:
    engine = make_engine(kernels)
    engine.apply(BlockOps(copies=copies((1, 2), (2, 3), (4, 3), (3, 5))))
    assert contents(engine) == [0, 1, 1, 4, 4, 4, 6, 7, 8]


def test_swapped_blocks_come_back_elsewhere(kernels: bool) -> None:
    engine = make_engine(kernels)
    engine.apply(BlockOps(swap_outs=copies((3, 1), (4, 4))))
    for cache in engine.caches:
        cache[:, 3:5] = 0
    engine.apply(BlockOps(swap_ins=copies((4, 6), (1, 7)), copies=copies((7, 8))))
    assert [cache[0, 6:, 0, 0, 0].tolist() for cache in engine.caches] == [[4, 3, 3], [104, 103, 103]]


def test_swap_outs_come_before_swap_ins_and_copies(kernels: bool) -> None:
    engine = make_engine(kernels)
    engine.apply(BlockOps(swap_outs=copies((2, 1)), swap_ins=copies((1, 3)), copies=copies((5, 2))))
    assert contents(engine) == [0, 1, 5, 2, 4, 5, 6, 7, 8]


def test_each_cache_group_has_blocks_of_its_own(kernels: bool) -> None:
    arenas = [
        Arena([0, 2], layout(9), 4),
        Arena([1], layout(4), 2),
    ]
    engine = CacheEngine(arenas, device(kernels))
    assert [len(cache[0]) for cache in engine.caches] == [9, 4, 9]
    for cache in engine.caches:
        cache += torch.arange(cache.shape[1]).view(1, -1, 1, 1, 1)
    engine.apply(BlockOps(copies=[BlockCopy(1, 3, 1), BlockCopy(1, 5), BlockCopy(3, 2, 1)]))
    found = [cache[0, :, 0, 0, 0].int().tolist() for cache in engine.caches]
    assert found == [[0, 1, 2, 3, 4, 1, 6, 7, 8], [0, 1, 1, 1], [0, 1, 2, 3, 4, 1, 6, 7, 8]]
    engine.apply(BlockOps(swap_outs=[BlockCopy(6, 4), BlockCopy(3, 2, 1)]))
    engine.apply(BlockOps(swap_ins=[BlockCopy(2, 1, 1), BlockCopy(4, 2)]))
    assert [cache[0, :3, 0, 0, 0].int().tolist() for cache in engine.caches] == [[0, 1, 6], [0, 1, 1], [0, 1, 6]]


@pytest.mark.skipif(sys.platform != "linux", reason="other systems keep memory until the process ends")
def test_memory_is_that_of_the_blocks_in_use(kernels: bool) -> None:
    # a block of all layers is half a large page
    engine = CacheEngine([Arena([0, 1], CacheLayout((2, 65, LARGE_PAGE_BYTES // 8), torch.uint8))], device(kernels))
    first = engine.caches[0]

    def num_pages() -> int:
        memory = first.as_strided((len(engine.caches) * first.numel(),), (1,))
        return resident_bytes(memory) // LARGE_PAGE_BYTES

    def fill(*blocks: int) -> None:
        for cache in engine.caches:
            cache[:, list(blocks)] = 1

    fill(*range(1, 33))
    assert num_pages() in (16, 17), "16 and two halves, which are whole where the system has large pages for them"
    fill(*range(33, 65))
    assert num_pages() == 32, "and the half that block 64 takes"
    engine.release([[*range(4, 13), *range(60, 64), 2]])
    assert num_pages() == 32 - 4 - 2, "blocks 4 to 11 and 60 to 63 are whole large pages, the others share theirs"
    for cache in engine.caches:
        assert cache[:, 1:4].all()
        assert cache[:, 13:60].all()
        assert cache[:, 64].all()
        assert not cache[:, 4:12].any()
    engine.release([[]])
