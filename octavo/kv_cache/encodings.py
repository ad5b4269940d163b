"""The blocks that hold the keys and values of an encoder's output: which requests have them, and their names.

All of them are written by the first row of a sequence, unless they are cached. Forks share them and never write them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from octavo.core.cache_key import CacheKey
from octavo.kv_cache.block_hash import encoding_names
from octavo.kv_cache.block_pool import Content
from octavo.kv_cache.block_table import BlockTable
from octavo.kv_cache.group_cache import GroupCache


class Encodings:
    """The cache groups among `groups` whose layers read an encoder's output; most models have none."""

    def __init__(self, groups: Sequence[GroupCache], *, enable_prefix_caching: bool) -> None:
        self._groups = [cache for cache in groups if cache.holds_encoding]
        self._is_published = enable_prefix_caching

    def __bool__(self) -> bool:
        return bool(self._groups)

    def publish(self, table: BlockTable, cache_key: CacheKey) -> None:
        """Enter what the planned row of a sequence writes into the prefix index."""
        table.lacks_encoding = False
        if not self._is_published:
            return
        for cache in self._groups:
            blocks = table.blocks[cache.index]
            table.encoding = encoding_names(cache_key, len(blocks))
            for name, block in zip(table.encoding, blocks, strict=True):
                cache.pool.publish(block, Content(name, name, ()))

    def invalidate(self, table: BlockTable) -> None:
        """Remove what a sequence has written from the prefix index: its content is wrong."""
        for cache in self._groups:
            for name in table.encoding:
                cache.pool.invalidate(name)

    def are_missing(self, tables: Iterable[BlockTable]) -> bool:
        """Return whether any of these sequences has not written its encoding yet."""
        return bool(self._groups) and any(table.lacks_encoding for table in tables)
