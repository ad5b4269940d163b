"""The blocks of one tier: reference counts, the prefix index, and the order in which cached blocks are evicted.

A block is used (count > 0), cached (count 0, but its content is in the index and may be taken again), or empty.
Empty blocks are given out first, then the cached block that was released longest ago.
"""

from __future__ import annotations

from collections import OrderedDict


class BlockPool:
    """`num_blocks` blocks with the ids 1 … num_blocks; id 0 is the null block that padding points to."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._counts = [0] * (num_blocks + 1)
        self._digests: list[bytes | None] = [None] * (num_blocks + 1)
        self._empty = list(range(num_blocks, 0, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._index: dict[bytes, int] = {}

    @property
    def num_free_blocks(self) -> int:
        """Blocks that `allocate` can give out: empty and cached ones."""
        return len(self._empty) + len(self._cached)

    @property
    def num_used_blocks(self) -> int:
        return self.num_blocks - self.num_free_blocks

    def allocate(self) -> int:
        """A block with count 1 and no content. The caller has checked `num_free_blocks`."""
        if self._empty:
            block = self._empty.pop()
        else:
            block, _ = self._cached.popitem(last=False)
            self._forget(block)
        self._counts[block] = 1
        return block

    def acquire(self, block: int) -> None:
        """One more user of a block that is used or cached."""
        if self._counts[block] == 0:
            del self._cached[block]
        self._counts[block] += 1

    def release(self, block: int) -> None:
        """One user less. Release the tail of a sequence first: among equals the longest prefix is evicted first."""
        count = self._counts[block] - 1
        assert count >= 0, f"block {block} released more often than acquired"
        self._counts[block] = count
        if count > 0:
            return
        if self._digests[block] is None:
            self._empty.append(block)
        else:
            self._cached[block] = None

    def num_users(self, block: int) -> int:
        """How many tables hold the block."""
        return self._counts[block]

    def is_shared(self, block: int) -> bool:
        return self._counts[block] > 1

    def is_cached(self, block: int) -> bool:
        """True for a block with content and without users."""
        return block in self._cached

    def find(self, digest: bytes) -> int | None:
        """The block with this content, or None."""
        return self._index.get(digest)

    def publish(self, block: int, digest: bytes) -> None:
        """State a used block's content. If another block already has it, this one stays anonymous."""
        assert self._counts[block] > 0, f"block {block} published without a user"
        if self._digests[block] is None and digest not in self._index:
            self._index[digest] = block
            self._digests[block] = digest

    def reset(self) -> bool:
        """Empty the prefix index. Only when no block is used; answers whether it was done."""
        if self.num_used_blocks:
            return False
        for block in list(self._cached):
            self._forget(block)
            self._empty.append(block)
        self._cached.clear()
        return True

    def _forget(self, block: int) -> None:
        digest = self._digests[block]
        assert digest is not None
        del self._index[digest]
        self._digests[block] = None

    def check(self, expected_counts: dict[int, int]) -> None:
        """Prove the accounting against the users' own count of each block. Raises AssertionError."""
        for block in range(1, self.num_blocks + 1):
            have, want = self._counts[block], expected_counts.get(block, 0)
            assert have == want, f"block {block} has count {have}, its users are {want}"
        assert self._counts[0] == 0, "the null block is in use"
        assert 0 not in expected_counts, "a table holds the null block"
        free = set(self._empty) | set(self._cached)
        assert len(free) == len(self._empty) + len(self._cached), "a block is free twice"
        assert free == {b for b in range(1, self.num_blocks + 1) if self._counts[b] == 0}, (
            "free lists and counts differ"
        )
        assert {d: b for b, d in enumerate(self._digests) if d is not None} == self._index, "the prefix index is wrong"
        assert all(self._digests[b] is None for b in self._empty), "an empty block has content"
        assert all(self._digests[b] is not None for b in self._cached), "a cached block has no content"
