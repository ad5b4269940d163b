"""A listener of the prefix index that has the same contents as the pools, if they call it rightly."""

from __future__ import annotations

from octavo.kv_cache.block_manager import BlockManager
from octavo.kv_cache.block_pool import Content


class Mirror:
    """contents: the content of each block by cache group and digest. all_removed: all that was removed, in order."""

    def __init__(self) -> None:
        self.contents: dict[tuple[int, bytes], tuple[int, Content]] = {}
        self.all_removed: list[tuple[int, bytes]] = []

    def stored(self, group: int, block: int, content: Content) -> None:
        assert (group, content.digest) not in self.contents, "stored twice"
        self.contents[group, content.digest] = block, content

    def removed(self, group: int, digest: bytes) -> None:
        del self.contents[group, digest]
        self.all_removed.append((group, digest))

    def of(self, group: int) -> dict[bytes, int]:
        """Return the blocks of one cache group by content."""
        return {digest: block for (index, digest), (block, _) in self.contents.items() if index == group}

    def check(self, manager: BlockManager) -> None:
        """Raise AssertionError unless the indexes of all pools have these contents."""
        for cache in manager.token_groups:
            assert self.of(cache.index) == cache.pool._index, "a listener was called wrongly"
