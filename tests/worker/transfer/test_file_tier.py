"""A rank's blocks in files: the same bytes come back, of its own layers and heads."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from octavo.config.schema import TransferConfig
from octavo.core.model_shape import KeysAndValues, Latent, State
from octavo.errors import ConfigError
from octavo.kv_transfer.messages import LoadBlocks, SaveBlocks
from octavo.worker.transfer.block_io import BlockIO, Place
from octavo.worker.transfer.file_tier import FileTiers, key_of
from tests.fakes.shapes import group
from tests.worker.transfer.test_block_io import BLOCK_SIZE, DTYPES, HEADS, as_bytes, io_of, make_caches

DIGESTS = [bytes([number]) * 32 for number in range(3)]


@pytest.fixture
def open_tiers(tmp_path: Path) -> Callable[..., FileTiers]:
    def open_tiers(blocks: BlockIO, tier: str = "disk", **identity: str) -> FileTiers:
        config = TransferConfig(kv_disk=str(tmp_path / "disk"))
        if tier == "host":
            config = TransferConfig(kv_host_size=1 << 20, host_folder=str(tmp_path / "octavo-kv-1"))
        return FileTiers(config, blocks, identity, BLOCK_SIZE)

    return open_tiers


@pytest.mark.parametrize("kind", ["cpu", "reference"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tier", ["disk", "host"])
def test_blocks_come_back_elsewhere(
    open_tiers: Callable[..., FileTiers], kind: str, dtype: torch.dtype, tier: str
) -> None:
    caches = make_caches(kind, dtype)
    blocks = io_of(caches)
    tiers = open_tiers(blocks, tier)
    before = [blocks.read(Place(layer, 0), [1, 2], range(HEADS)) for layer in range(2)]
    tiers.save(SaveBlocks(0, [tier], DIGESTS[:2], [[1, 2]]))
    others = [as_bytes(cache) for cache in caches]
    for layer in range(2):
        blocks.write(Place(layer, 0), [1, 2], range(HEADS), torch.zeros_like(before[layer]))
    num_bytes = tiers.load(LoadBlocks(0, tier, DIGESTS[:2], [[1, 2]]))
    assert num_bytes == sum(each.nbytes for each in before)
    assert all(torch.equal(as_bytes(cache), other) for cache, other in zip(caches, others, strict=True))
    tiers.load(LoadBlocks(0, tier, DIGESTS[:2], [[5, 3]]))
    for layer in range(2):
        assert torch.equal(blocks.read(Place(layer, 0), [5, 3], range(HEADS)), before[layer])
    tiers.close()


@pytest.mark.parametrize("name", ["kv_disk_size", "kv_host_size"])
def test_a_tier_with_less_room_than_a_block_is_refused(tmp_path: Path, name: str) -> None:
    blocks = io_of(make_caches("cpu", torch.float32))
    config = TransferConfig(kv_disk=str(tmp_path / "disk"), host_folder=str(tmp_path / "octavo-kv-1"), **{name: 100})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=rf"{name} is 100 bytes, and a KV block has [\d,]+; raise it"):
        FileTiers(config, blocks, {}, BLOCK_SIZE)
    assert list(tmp_path.iterdir()) == []


def test_a_block_that_is_not_there_or_was_dropped_fails_the_load(open_tiers: Callable[..., FileTiers]) -> None:
    blocks = io_of(make_caches("reference", torch.float32))
    tiers = open_tiers(blocks)
    tiers.save(SaveBlocks(0, ["disk"], DIGESTS[:1], [[1]]))
    with pytest.raises(LookupError, match="block 1 of 2 is not in the tier disk"):
        tiers.load(LoadBlocks(0, "disk", DIGESTS[:2], [[2, 3]]))
    tiers.drop(DIGESTS)
    with pytest.raises(LookupError, match="block 0 of 1"):
        tiers.load(LoadBlocks(0, "disk", DIGESTS[:1], [[2]]))


def test_another_identity_finds_nothing(open_tiers: Callable[..., FileTiers]) -> None:
    blocks = io_of(make_caches("reference", torch.float32))
    open_tiers(blocks, model="a").save(SaveBlocks(0, ["disk"], DIGESTS[:1], [[1]]))
    open_tiers(blocks, model="a").load(LoadBlocks(0, "disk", DIGESTS[:1], [[2]]))
    with pytest.raises(LookupError):
        open_tiers(blocks, model="b").load(LoadBlocks(0, "disk", DIGESTS[:1], [[2]]))


def test_each_rank_has_files_of_its_own(open_tiers: Callable[..., FileTiers]) -> None:
    ranks = [io_of(make_caches("reference", torch.float32, heads=2), heads=range(first, first + 2)) for first in (0, 2)]
    tiers = [open_tiers(blocks) for blocks in ranks]
    for each in tiers:
        each.save(SaveBlocks(0, ["disk"], DIGESTS[:1], [[1]]))
        each.load(LoadBlocks(0, "disk", DIGESTS[:1], [[2]]))
    for blocks, each in zip(ranks, tiers, strict=True):
        assert torch.equal(*(blocks.read(Place(1, 0), [block], blocks.heads[0]) for block in (1, 2)))
        assert len({each.folders[0].key for each in tiers}) == 2


def test_null_blocks_are_neither_saved_nor_loaded(open_tiers: Callable[..., FileTiers]) -> None:
    groups = [group(0), group(1)]
    blocks = io_of(make_caches("reference", torch.float32), groups)
    tiers = open_tiers(blocks)
    tiers.save(SaveBlocks(0, ["disk"], DIGESTS, [[1, 2, 3], [0, 0, 4]]))
    before = blocks.read(Place(1, 1), [1, 2], range(HEADS))
    tiers.load(LoadBlocks(0, "disk", DIGESTS, [[1, 2, 3], [0, 0, 5]]))
    assert torch.equal(blocks.read(Place(1, 1), [5], range(HEADS)), blocks.read(Place(1, 1), [4], range(HEADS)))
    assert torch.equal(blocks.read(Place(1, 1), [1, 2], range(HEADS)), before)
    with pytest.raises(LookupError):
        tiers.load(LoadBlocks(0, "disk", DIGESTS, [[1, 2, 3], [5, 5, 5]]))


def test_kinds_and_sizes_of_caches_are_part_of_the_key() -> None:
    cache = torch.zeros(1, 4, 12)
    kinds = [State(12), Latent(12, 8), Latent(12, 4), KeysAndValues(1, 6)]
    groups = [[group(0, keeps=each)] for each in kinds] + [[group(0, window=8)], [group(0)]]
    blocks = [BlockIO([cache], each, [range(1)], range(1)) for each in groups]
    blocks.append(BlockIO([cache[..., :6]], groups[-1], [range(1)], range(1)))
    assert len({key_of(each, {}, BLOCK_SIZE) for each in blocks}) == len(blocks)
