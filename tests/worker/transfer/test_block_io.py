"""Blocks as bytes: both layouts of caches, heads of several ranks, cache groups and stages."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from octavo.config.schema import DeviceConfig
from octavo.core.model_shape import CacheGroup
from octavo.devices.cpu.attention import CpuBackend
from octavo.devices.cpu.device import CpuDevice
from octavo.devices.reference.attention import ReferenceBackend
from octavo.platform import Platform
from octavo.worker.transfer.block_io import BlockIO
from tests.fakes.shapes import group

NUM_BLOCKS, BLOCK_SIZE, HEADS, DIM = 6, 16, 4, 8
DTYPES = [torch.float32, torch.bfloat16, torch.int8, torch.float8_e4m3fn]


def make_caches(kind: str, dtype: torch.dtype, heads: int = HEADS, num_layers: int = 2) -> list[Tensor]:
    """Caches whose bytes are all random."""
    if kind == "reference":
        backend: CpuBackend | ReferenceBackend = ReferenceBackend(dtype)
    else:
        if CpuDevice.obstacle(Platform.detect()) is not None:
            pytest.skip("needs the compiled kernels")
        device = CpuDevice(DeviceConfig(threads=1), Platform.detect(), "")
        chosen = device.attention(torch.float32, dtype, head_dim=DIM, block_size=BLOCK_SIZE).backend
        assert isinstance(chosen, CpuBackend)
        backend = chosen
    shape = backend.cache_shape(NUM_BLOCKS, BLOCK_SIZE, heads, DIM)
    caches = []
    for _ in range(num_layers):
        cache = torch.zeros(shape, dtype=backend.element_type)
        cache.view(-1).view(torch.uint8).random_(256)
        caches.append(cache)
    return caches


def as_bytes(cache: Tensor) -> Tensor:
    return cache.view(-1).view(torch.uint8).clone()


def groups_of(num_layers: int = 2) -> list[CacheGroup]:
    return [group(*range(num_layers))]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", ["native", "reference"])
def test_blocks_that_are_read_and_written_elsewhere_are_the_same_bytes(kind: str, dtype: torch.dtype) -> None:
    sources, targets = make_caches(kind, dtype), make_caches(kind, dtype)
    before = [[as_bytes(cache[:, block].clone()) for block in range(NUM_BLOCKS)] for cache in targets]
    ours, theirs = (BlockIO(caches, groups_of(), HEADS) for caches in (sources, targets))
    for layer in (0, 1):
        theirs.write(layer, [5, 1, 2], theirs.heads, ours.read(layer, [3, 0, 4], ours.heads))
        for source, target in ((3, 5), (0, 1), (4, 2)):
            assert torch.equal(as_bytes(targets[layer][:, target].clone()), as_bytes(sources[layer][:, source].clone()))
        for untouched in (0, 3, 4):
            assert torch.equal(as_bytes(targets[layer][:, untouched].clone()), before[layer][untouched])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", ["native", "reference"])
def test_heads_of_two_ranks_are_those_of_one(kind: str, dtype: torch.dtype) -> None:
    whole = make_caches(kind, dtype)
    one = BlockIO(whole, groups_of(), HEADS)
    two = [BlockIO(make_caches(kind, dtype, HEADS // 2), groups_of(), HEADS // 2, (0, start)) for start in (0, 2)]
    for rank in two:
        rank.write(1, [4, 2], rank.heads, one.read(1, [1, 3], rank.heads))
    back = BlockIO(make_caches(kind, dtype), groups_of(), HEADS)
    for head in range(HEADS):
        part = range(head, head + 1)
        back.write(1, [0, 5], part, two[head // 2].read(1, [4, 2], part))
    assert torch.equal(back.read(1, [0, 5], back.heads), one.read(1, [1, 3], one.heads))


def test_layers_of_a_stage_and_their_groups_have_the_numbers_of_the_whole_model() -> None:
    groups = [group(0, 2), group(1, window=32)]
    caches = make_caches("reference", torch.float32, num_layers=3)
    stage = BlockIO(caches, groups, HEADS, (4, 0))
    assert list(stage.layers) == [4, 5, 6]
    assert [stage.group_of(layer) for layer in stage.layers] == [0, 1, 0]
    assert torch.equal(stage.read(6, [2], stage.heads).view(-1), as_bytes(caches[2][:, 2].clone()))
    with pytest.raises(ValueError, match="not in range"):
        stage.read(3, [2], stage.heads)


def test_content_of_another_shape_is_not_written() -> None:
    blocks = BlockIO(make_caches("reference", torch.float32), groups_of(), HEADS)
    with pytest.raises(AssertionError, match="another shape"):
        blocks.write(0, [1, 2], blocks.heads, blocks.read(0, [1], blocks.heads))
