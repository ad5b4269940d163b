"""Block managers of one cache group, and what its tables hold."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from octavo.core.cache_limits import CacheLimits
from octavo.core.sequence import Sequence
from octavo.kv_cache.block_manager import BlockManager, PrefixHit
from octavo.kv_cache.block_pool import BlockPool, Content
from octavo.kv_cache.group_cache import GroupCache

_OPTIONS = ("watermark", "enable_prefix_caching", "eviction", "max_cached_bytes")


def make_manager(num_blocks: int = 10, block_size: int = 4, **options: Any) -> BlockManager:
    """`options`: those of `BlockManager`, and of `CacheLimits.of_one_group`."""
    chosen = {name: options.pop(name) for name in _OPTIONS if name in options}
    return BlockManager(CacheLimits.of_one_group(num_blocks, block_size, **options), **chosen)


def only(manager: BlockManager) -> GroupCache:
    """Return its one cache group."""
    (cache,) = manager.groups
    return cache


def table(manager: BlockManager, sequence: Sequence) -> list[int]:
    """Return the block ids of a sequence."""
    (blocks,) = manager.block_ids(sequence)
    return blocks


def allocate(manager: BlockManager, num_tokens: int, seq_id: int = 1) -> Sequence:
    sequence = Sequence(seq_id, 0, list(range(num_tokens)), num_tokens)
    manager.allocate(sequence, num_tokens, PrefixHit())
    return sequence


def cached(pool: BlockPool, digest: bytes, token_ids: Iterable[int] = ()) -> int:
    """A block with this content, which nobody uses any more."""
    block = pool.allocate()
    pool.publish(block, Content(digest, b"parent", tuple(token_ids)))
    pool.release(block)
    return block
