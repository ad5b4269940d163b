"""Where the tokens of one sequence are: its blocks in each cache group, and what the prefix index knows of them."""

from __future__ import annotations

from dataclasses import dataclass, field

from octavo.kv_cache.block_pool import NULL_BLOCK


@dataclass(slots=True, eq=False)
class BlockTable:
    """The blocks of one sequence in each cache group. Only the block manager writes it."""

    blocks: list[list[int]] = field(default_factory=list)
    """For each cache group the block ids in the order of the tokens; null blocks stand for those that no later step
    reads. Empty while the sequence has no blocks."""
    num_unseen: list[int] = field(default_factory=list)
    """For each cache group the number of leading null blocks."""
    snapshots: tuple[int, ...] = ()
    """Of the prompt, the numbers of leading blocks after which a state is kept for later requests."""
    is_on_host: bool = False
    """The ids are those of host blocks: the sequence is swapped out."""
    digests: list[bytes] = field(default_factory=list)
    """Digests of the full blocks of known tokens, as far as they were needed."""
    num_published: int = 0
    """Leading blocks that the prefix index may have."""
    tail: bytes | None = None
    """Digest of the partly filled block after these, if the prefix index may have it."""
    encoding: tuple[bytes, ...] = ()
    """Digests of the blocks with an encoder's output that it has written; mostly empty."""
    lacks_encoding: bool = False
    """Its next row has to write these blocks."""
    writable_end: int = 0
    """Tokens from the next one to be computed up to this one are in blocks of this sequence alone; 0 where that is not
    known."""

    def set_blocks(self, blocks: list[list[int]], num_published: int = 0, *, is_on_host: bool = False) -> None:
        """Replace all blocks. `num_published` leading ones are in the prefix index."""
        self.blocks = blocks
        self.num_unseen = [each.count(NULL_BLOCK) for each in blocks]
        self.num_published = num_published
        self.tail = None
        self.writable_end = 0
        self.is_on_host = is_on_host
