"""The tiers of a rank: its shard of KV blocks in files, in shared memory and on disk."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate, pairwise
from pathlib import Path

import torch
from torch import Tensor

from octavo.config.schema import TransferConfig
from octavo.core.cache_limits import CacheLimits
from octavo.errors import ConfigError
from octavo.kv_transfer.fetch_rates import MeasuredRates
from octavo.kv_transfer.file_store import folder_key, open_store
from octavo.kv_transfer.host_folder import HostFolder
from octavo.kv_transfer.messages import LoadBlocks, SaveBlocks, TierFolder
from octavo.worker.transfer.block_io import BlockIO, Place
from octavo.worker.transfer.pieces import bounds


class FileTiers:
    """A file for each block and cache group: the heads of this rank in its layers, one layer after the other.

    One thread loads, another one saves. folders: where the files are.
    """

    def __init__(self, config: TransferConfig, blocks: BlockIO, identity: Mapping[str, str], block_size: int) -> None:
        """identity: the values that the bits of a block depend on. Raises ConfigError for a folder that cannot be used
        and for a size below that of a block."""
        self._blocks = blocks
        self._places = [[place for place in blocks.places if place.group == g] for g in range(blocks.num_groups)]
        self._ends = [list(accumulate(map(self._num_bytes, each), initial=0)) for each in self._places]
        key = key_of(blocks, identity, block_size)
        block_bytes, sizes = sum(ends[-1] for ends in self._ends), {"kv_host_size": config.kv_host_size}
        sizes |= {"kv_disk_size": config.kv_disk_size}
        for name, size in sizes.items():
            if size is not None and size < block_bytes:
                raise ConfigError(f"{name} is {size:,} bytes, and a KV block has {block_bytes:,}; raise it")
        self._host: HostFolder | None = None
        self.folders: list[TierFolder] = []
        if config.kv_host_size is not None:
            self._host = HostFolder(Path(config.host_folder), config.kv_host_size)
            self.folders.append(TierFolder("host", config.host_folder, key, config.kv_host_size))
        if config.kv_disk is not None:
            self.folders.append(TierFolder("disk", config.kv_disk, key, config.kv_disk_size))
        self._stores = {each.tier: open_store(each) for each in self.folders}

    def load(self, command: LoadBlocks) -> int:
        """Write all of the blocks and return their bytes. Raises LookupError if a file is missing or invalid."""
        store, num_bytes = self._stores[command.tier], 0
        contents = [torch.empty(ends[-1], dtype=torch.uint8) for ends in self._ends]
        for place, digest in enumerate(command.digests):
            for group, content in enumerate(contents):
                if block := command.block_ids[group][place]:
                    if not store.read(digest, group, _bytes(content)):
                        raise LookupError(f"block {place} of {len(command.digests)} is not in the tier {command.tier}")
                    self._write(group, block, content)
                    num_bytes += content.nbytes
        for digest in reversed(command.digests):  # so that the end of a prefix is removed first
            for group in range(len(contents)):
                store.touch(digest, group)
        return num_bytes

    def _write(self, group: int, block: int, content: Tensor) -> None:
        heads = self._blocks.heads[group]
        for place, (start, end) in zip(self._places[group], pairwise(self._ends[group]), strict=True):
            self._blocks.write(place, [block], heads, content[start:end].view(self._blocks.shape(place, 1, heads)))

    def save(self, command: SaveBlocks) -> None:
        """Store the blocks that have no file yet."""
        stores = [self._stores[tier] for tier in command.tiers]
        for place, digest in enumerate(command.digests):
            for group, places in enumerate(self._places):
                block = command.block_ids[group][place]
                wanting = [store for store in stores if block and store.is_saving and not store.has(digest, group)]
                if wanting:
                    heads = self._blocks.heads[group]
                    parts = [self._blocks.read(place, [block], heads).cpu() for place in places]
                    for store in wanting:
                        store.write(digest, group, [_bytes(part) for part in parts])

    def drop(self, digests: list[bytes]) -> None:
        """Remove the files of blocks whose content was found to be wrong."""
        for store in self._stores.values():
            for digest in digests:
                for group in range(len(self._places)):
                    store.remove(digest, group)

    def close(self) -> None:
        """Close the files. Blocks in shared memory are removed with the last engine of the server."""
        for store in self._stores.values():
            store.close()
        if self._host is not None:
            self._host.close()

    def _num_bytes(self, place: Place) -> int:
        planes, _, heads, num_bytes = self._blocks.shape(place, 1, self._blocks.heads[place.group])
        return planes * heads * num_bytes


def key_of(blocks: BlockIO, identity: Mapping[str, str], block_size: int) -> bytes:
    """Return the key of a rank's blocks (`folder_key`)."""
    layers, heads = bounds(blocks.layers), [bounds(each) for each in blocks.heads]
    # the attention backend is among the operators of the identity
    layout = "; ".join(
        f"{place} of {blocks.groups[place.group]}: {blocks.shape(place, 1, range(1))}" for place in blocks.places
    )
    return folder_key(identity, layout=layout, block_size=block_size, layers=layers, heads=heads)


def explain_folder(folder: Path, blocks: BlockIO, identity: Mapping[str, str], limits: CacheLimits) -> str:
    """Return a text with the length from which on prefixes are fetched from a folder of kv_disk, and the reason."""
    measured = MeasuredRates.read(folder / key_of(blocks, identity, limits.block_size).hex()[:32])
    return measured.render(limits.block_size, sum(group.block_bytes for group in limits.groups))


def _bytes(content: Tensor) -> memoryview:
    return memoryview(content.view(-1).numpy())  # type: ignore[arg-type]
