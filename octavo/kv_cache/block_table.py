"""Where the tokens of one sequence are: its blocks in each cache group, and what the prefix index knows of them."""

from __future__ import annotations

from dataclasses import dataclass, field

from octavo.kv_cache.block_pool import NULL_BLOCK


@dataclass(slots=True, eq=False)
class BlockTable:
    """Written by the block manager alone.

    blocks: for each cache group the block ids in the order of the tokens; null blocks stand for those that no later
        step reads. Empty while the sequence has no blocks.
    is_on_host: the ids are those of host blocks: the sequence is swapped out.
    num_unseen: for each cache group how many leading blocks are null.
    snapshots: of the prompt, the numbers of leading blocks behind which a state is to be found later.
    digests: names of the full blocks of known tokens, as far as they were needed.
    num_published: leading blocks that the prefix index may name.
    tail: the name of the partly filled block behind them that the prefix index may have; None where there is none.
    encoding: names of the blocks with an encoder's output that it has written; mostly empty.
    lacks_encoding: its next row is to write these blocks.
    writable_end: tokens from the next one to be computed up to this one lie in blocks of this sequence alone; 0 where
        that has to be looked up.
    """

    blocks: list[list[int]] = field(default_factory=list)
    num_unseen: list[int] = field(default_factory=list)
    snapshots: tuple[int, ...] = ()
    is_on_host: bool = False
    digests: list[bytes] = field(default_factory=list)
    num_published: int = 0
    tail: bytes | None = None
    encoding: tuple[bytes, ...] = ()
    lacks_encoding: bool = False
    writable_end: int = 0

    def set_blocks(self, blocks: list[list[int]], num_published: int = 0, *, is_on_host: bool = False) -> None:
        """Replace all blocks. `num_published` leading ones are in the prefix index."""
        self.blocks = blocks
        self.num_unseen = [each.count(NULL_BLOCK) for each in blocks]
        self.num_published = num_published
        self.tail = None
        self.writable_end = 0
        self.is_on_host = is_on_host
