"""Blocks as bytes: both layouts of caches, heads of several ranks, cache groups and stages."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from octavo.config.schema import DeviceConfig
from octavo.core.model_shape import CacheGroup, Indexed, IndexedLatent, KeysAndValues, Latent, Spaced, State
from octavo.devices.cpu.attention import CpuBackend
from octavo.devices.cpu.device import CpuDevice
from octavo.devices.reference.attention import ReferenceBackend
from octavo.distributed.mesh import Axis, Mesh
from octavo.platform import Platform
from octavo.worker.transfer.block_io import BlockIO, Place, held_heads
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
        chosen = device.attention(torch.float32, dtype, head_dims=[DIM], block_size=BLOCK_SIZE).backend
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


def io_of(
    caches: list[Tensor], groups: list[CacheGroup] | None = None, heads: range = range(HEADS), first: int = 0
) -> BlockIO:
    """The blocks of layers from `first` on, with these heads in each of `groups`, which are one unless given."""
    groups = groups or groups_of(len(caches))
    num_layers = 1 + max(layer for each in groups for layer in each.layers)
    return BlockIO(caches, groups, [heads] * len(groups), range(first, first + num_layers))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", ["native", "reference"])
def test_blocks_that_are_read_and_written_elsewhere_are_the_same_bytes(kind: str, dtype: torch.dtype) -> None:
    sources, targets = make_caches(kind, dtype), make_caches(kind, dtype)
    before = [[as_bytes(cache[:, block].clone()) for block in range(NUM_BLOCKS)] for cache in targets]
    ours, theirs = (io_of(caches) for caches in (sources, targets))
    for layer in (0, 1):
        place = Place(layer, 0)
        theirs.write(place, [5, 1, 2], range(HEADS), ours.read(place, [3, 0, 4], range(HEADS)))
        for source, target in ((3, 5), (0, 1), (4, 2)):
            assert torch.equal(as_bytes(targets[layer][:, target].clone()), as_bytes(sources[layer][:, source].clone()))
        for untouched in (0, 3, 4):
            assert torch.equal(as_bytes(targets[layer][:, untouched].clone()), before[layer][untouched])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", ["native", "reference"])
def test_heads_of_two_ranks_are_those_of_one(kind: str, dtype: torch.dtype) -> None:
    whole = make_caches(kind, dtype)
    one, place = io_of(whole), Place(1, 0)
    two = [io_of(make_caches(kind, dtype, HEADS // 2), heads=range(start, start + 2)) for start in (0, 2)]
    for rank in two:
        rank.write(place, [4, 2], rank.heads[0], one.read(place, [1, 3], rank.heads[0]))
    back = io_of(make_caches(kind, dtype))
    for head in range(HEADS):
        part = range(head, head + 1)
        back.write(place, [0, 5], part, two[head // 2].read(place, [4, 2], part))
    assert torch.equal(back.read(place, [0, 5], range(HEADS)), one.read(place, [1, 3], range(HEADS)))


def test_layers_of_a_stage_and_their_groups_have_the_numbers_of_the_whole_model() -> None:
    groups = [group(0, 2), group(1, window=32)]
    caches = make_caches("reference", torch.float32, num_layers=3)
    stage = io_of(caches, groups, first=4)
    assert list(stage.layers) == [4, 5, 6]
    assert stage.places == [(4, 0), (5, 1), (6, 0)]
    assert torch.equal(stage.read(Place(6, 0), [2], range(HEADS)).view(-1), as_bytes(caches[2][:, 2].clone()))
    with pytest.raises(KeyError):
        stage.read(Place(3, 0), [2], range(HEADS))


def test_a_layer_in_several_groups_has_a_cache_of_each_kind() -> None:
    groups = [group(0, 1), group(0, keeps=State(6)), group(1, keeps=Latent(5, 3))]
    attention = make_caches("reference", torch.float32)
    state, latent = torch.randn(1, NUM_BLOCKS, 6), torch.randn(1, NUM_BLOCKS, BLOCK_SIZE, 5)
    caches, half = [attention[0], state, attention[1], latent], Mesh(Axis(1, 2))
    whole = BlockIO(caches, groups, [held_heads(each.keeps, Mesh.single()) for each in groups], range(2))
    assert whole.places == [(0, 0), (0, 1), (1, 0), (1, 2)]
    for place, cache in zip(whole.places, caches, strict=True):
        content = whole.read(place, [4, 2], whole.heads[place.group])
        assert torch.equal(content.view(-1), as_bytes(cache[:, [4, 2]].clone()))
    # of two ranks, the second has the second key head, a state that the first does not have, and the same latents, with
    # or without small keys, and vectors; of heads with blocks that are chosen it has its own part of all
    kept = KeysAndValues(2, 8), State(6), Latent(5, 3), Indexed(4, 8, 8, 64), IndexedLatent(5, 3, 4, 64), Spaced(8, 4)
    assert [held_heads(each, half) for each in kept] == [
        range(1, 2),
        range(1, 2),
        range(1),
        range(1, 2),
        range(1),
        range(1),
    ]


def test_content_of_another_shape_is_not_written() -> None:
    blocks = io_of(make_caches("reference", torch.float32))
    with pytest.raises(AssertionError, match="another shape"):
        blocks.write(Place(0, 0), [1, 2], range(HEADS), blocks.read(Place(0, 0), [1], range(HEADS)))


def test_reading_a_block_takes_memory_for_that_block_alone() -> None:
    """The layers of a block lie side by side, as the worker has them, so that the blocks of one layer are apart."""
    num_blocks, num_layers, num_bytes = 64, 4, 4096
    arena = torch.zeros(num_blocks, num_layers, num_bytes, dtype=torch.uint8)
    caches = [arena[None, :, layer] for layer in range(num_layers)]
    blocks = io_of(caches)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        content = blocks.read(Place(1, 0), [7, 3], range(HEADS))
    taken = [event.self_cpu_memory_usage for event in profile.events()]
    assert content.numel() == 2 * num_bytes
    assert 0 < sum(size for size in taken if size > 0) < 4 * num_bytes
