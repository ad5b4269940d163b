"""The blocks of one tier: reference counts, the prefix index, and the order in which cached blocks are evicted.

A block is used (count > 0), cached (count 0, but its content is in the index and may be taken again), or empty.
Empty blocks that were used before are allocated first, because they have memory already, then blocks that were never
used (fresh ones), then the cached block that `eviction` returns.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from octavo.core.live import CACHED, FREE, SHARED, USED
from octavo.kv_cache.block_hash import TokenKey
from octavo.kv_cache.eviction import Eviction, LeastRecentlyUsed, SpareFirst
from octavo.kv_cache.listener import BlockListener

NULL_BLOCK = 0
"""The id of no block: padding points to it, and it stands for blocks that no step reads."""
_MOST_SIBLINGS = 16
"""Most blocks after one prefix that are compared, token by token, for the longest common beginning."""
_REMEMBERED = 1 << 14
"""How many digests of evicted blocks are remembered, to distinguish an eviction from a prefix that was never cached."""


class Content(NamedTuple):
    """The content of a block: its name, the name of the prefix before it, and the key of each position. is_first:
    it begins its prompt, and the name before it is the root of its chain."""

    digest: bytes
    parent: bytes
    token_keys: tuple[TokenKey, ...]
    is_first: bool = False


class BlockPool:
    """`num_blocks` blocks with the ids 1 … num_blocks; id 0 is the null block that padding points to.

    cached_bytes: the limit on the bytes of cached blocks; None for no limit. group: the cache group. listeners: called
    when content enters or leaves the prefix index. on_evicted: called with the digest of content that is evicted.
    """

    def __init__(
        self,
        num_blocks: int,
        eviction: Eviction | None = None,
        cached_bytes: CachedBytes | None = None,
        group: int = 0,
    ) -> None:
        self.num_blocks = num_blocks
        self.listeners: list[BlockListener] = []
        self.on_evicted: Callable[[bytes], None] | None = None
        self._group = group
        self._cached_bytes = cached_bytes
        self._released_at = [0] * (num_blocks + 1) if cached_bytes is not None else []
        self._counts = [0] * (num_blocks + 1)
        self._contents: list[Content | None] = [None] * (num_blocks + 1)
        self._hits = [0] * (num_blocks + 1)
        # the first `_num_fresh` are fresh; the last one is given out next
        self._empty = list(range(num_blocks, 0, -1))
        self._num_fresh = num_blocks
        self._cached: Eviction = LeastRecentlyUsed() if eviction is None else eviction
        self.num_free_blocks = num_blocks
        """The number of blocks that `allocate` can return: empty and cached ones."""
        self._index: dict[bytes, int] = {}
        self._after: dict[bytes, list[int]] = {}
        self._evicted: OrderedDict[bytes, None] = OrderedDict()

    @property
    def num_used_blocks(self) -> int:
        return self.num_blocks - self.num_free_blocks

    @property
    def num_cached_blocks(self) -> int:
        return self.num_free_blocks - len(self._empty)

    @property
    def oldest_release(self) -> int:
        """When the cached block that would be evicted was released, in ticks of the limit on cached bytes."""
        return self._released_at[self._cached.peek()]

    def allocate(self) -> int:
        """Return a block with count 1 and no content. The caller has checked `num_free_blocks`."""
        num_empty = len(self._empty)
        if num_empty > self._num_fresh:
            block = self._empty.pop()
        elif num_empty and (self._cached_bytes is None or self._cached_bytes.make_room(self)):
            block = self._empty.pop()
            self._num_fresh = num_empty - 1
        else:
            block = self._evict()
        self._counts[block] = 1
        self.num_free_blocks -= 1
        return block

    def give_up(self) -> None:
        """Evict a cached block, which is empty then. The caller has checked `num_cached_blocks`."""
        self._empty.append(self._evict())

    def _evict(self) -> int:
        block = self._cached.pop()
        digest = self._forget(block)
        self._evicted[digest] = None
        if len(self._evicted) > _REMEMBERED:
            self._evicted.popitem(last=False)
        if self.on_evicted is not None:
            self.on_evicted(digest)
        return block

    def empty_blocks(self) -> list[int]:
        """Return the blocks that have neither users nor content: nothing in their memory is needed."""
        return list(self._empty)

    def acquire(self, block: int) -> None:
        """Add a user to a block that is used or cached."""
        if self._counts[block] == 0:
            self._cached.remove(block)
            self.num_free_blocks -= 1
        self._counts[block] += 1

    def share(self, blocks: Iterable[int]) -> None:
        """Add a user to each of these blocks, which are used already."""
        counts = self._counts
        for block in blocks:
            counts[block] += 1

    def release(self, block: int, *, is_spare: bool = False) -> None:
        """Remove a user from a block. Tails are released before heads: of equals the longest prefix is evicted first.

        is_spare: it is evicted before other blocks, unless it was found before.
        """
        count = self._counts[block] - 1
        assert count >= 0, f"block {block} released more often than acquired"
        self._counts[block] = count
        if count > 0:
            return
        self.num_free_blocks += 1
        if self._contents[block] is None:
            self._empty.append(block)
        elif is_spare and not self._hits[block]:
            self._add_spare(block)
        else:
            self._cached.add(block, self._hits[block])
            if self._cached_bytes is not None:
                self._released_at[block] = self._cached_bytes.tick()

    def demote(self, digest: bytes) -> None:
        """Evict the block with this content, if it has no users, before others: nothing will find it."""
        block = self._index.get(digest)
        if block is not None and self._counts[block] == 0:
            self._cached.remove(block)
            self._add_spare(block)

    def _add_spare(self, block: int) -> None:
        if not isinstance(self._cached, SpareFirst):
            self._cached = SpareFirst(self._cached)
        self._cached.add_spare(block)
        if self._cached_bytes is not None:
            self._released_at[block] = 0  # as if it had been released before all others

    def num_users(self, block: int) -> int:
        """Return how many users the block has."""
        return self._counts[block]

    def kinds(self) -> list[int]:
        """Return what each block is, from the null block on: FREE, CACHED, USED, or SHARED by several users."""
        kinds = [USED if count == 1 else SHARED if count else CACHED for count in self._counts]
        for block in self._empty:
            kinds[block] = FREE
        return kinds

    def is_shared(self, block: int) -> bool:
        return self._counts[block] > 1

    def is_cached(self, block: int) -> bool:
        """Return whether the block has content and no users."""
        return block in self._cached

    # ---- the prefix index ----

    def find(self, digest: bytes) -> int | None:
        """Return the block with this content, or None."""
        return self._index.get(digest)

    def find_beginning(self, parent: bytes, token_keys: Sequence[TokenKey]) -> tuple[int, int]:
        """Return the block after the prefix `parent` whose content begins most like `token_keys`, and how
        many of its tokens are the same; (0, 0) when none begins alike."""
        best, most = 0, 0
        for block in self._after.get(parent, ())[:_MOST_SIBLINGS]:
            content = self._contents[block]
            assert content is not None
            same = 0
            for mine, theirs in zip(token_keys, content.token_keys, strict=False):
                if mine != theirs:
                    break
                same += 1
            if same > most:
                best, most = block, same
        return best, most

    def note_hit(self, block: int) -> None:
        """Count that the block was found and is used."""
        self._hits[block] += 1

    def was_evicted(self, digest: bytes) -> bool:
        """Return whether this content was in the index not long ago."""
        return digest in self._evicted

    def publish(self, block: int, content: Content) -> None:
        """Enter a used block's content into the index, unless another block has that content."""
        assert self._counts[block] > 0, f"block {block} published without a user"
        if self._contents[block] is None and content.digest not in self._index:
            self._index[content.digest] = block
            self._contents[block] = content
            self._hits[block] = 0
            self._after.setdefault(content.parent, []).append(block)
            self._evicted.pop(content.digest, None)
            for listener in self.listeners:
                listener.stored(self._group, block, content)

    def invalidate(self, digest: bytes) -> None:
        """Remove content that is not to be trusted from the index; its block, if cached, becomes empty."""
        block = self._index.get(digest)
        if block is None:
            return
        if self._counts[block] == 0:
            self._cached.remove(block)
            self._empty.append(block)
        self._forget(block)

    def reset(self) -> bool:
        """Empty the prefix index. Returns False, with nothing changed, while a block is used."""
        if self.num_used_blocks:
            return False
        while len(self._empty) < self.num_blocks:
            block = self._cached.pop()
            self._forget(block)
            self._empty.append(block)
        self._evicted.clear()
        return True

    def _forget(self, block: int) -> bytes:
        content = self._contents[block]
        assert content is not None
        del self._index[content.digest]
        self._contents[block] = None
        siblings = self._after[content.parent]
        siblings.remove(block)
        if not siblings:
            del self._after[content.parent]
        for listener in self.listeners:
            listener.removed(self._group, content.digest)
        return content.digest


class CachedBytes:
    """A limit on the bytes of cached blocks in the pools of all cache groups.

    While more is cached, a cached block is given up before a fresh one is taken: of those that the groups would evict
    the one with the largest product of bytes and age, which is counted in releases of blocks.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._pools: list[tuple[BlockPool, int]] = []
        self._now = 0

    def add(self, pool: BlockPool, block_bytes: int) -> None:
        self._pools.append((pool, block_bytes))

    def tick(self) -> int:
        """Return the time of a release."""
        self._now += 1
        return self._now

    def make_room(self, pool: BlockPool) -> bool:
        """Give up cached blocks of other pools while too much is cached. Returns False when the next is one of `pool`
        itself, which takes it instead of a fresh one."""
        while sum([each.num_cached_blocks * size for each, size in self._pools]) > self._limit:
            weights = [
                ((self._now + 1 - each.oldest_release) * size, each is pool, each)
                for each, size in self._pools
                if each.num_cached_blocks
            ]
            _, is_own, heaviest = max(weights, key=lambda weight: weight[:2])
            if is_own:
                return False
            heaviest.give_up()
        return True


def release_table(pool: BlockPool, table: list[int]) -> None:
    """Remove a user from each block of a table, the last block first."""
    for block in reversed(table):
        if block != NULL_BLOCK:
            pool.release(block)
