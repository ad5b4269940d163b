"""Arithmetic on tokens and blocks."""

from __future__ import annotations


def num_blocks_for(num_tokens: int, block_size: int) -> int:
    """Return the blocks that hold `num_tokens` token slots."""
    return -(-num_tokens // block_size)


def num_blocks_touched(num_tokens: int, block_size: int) -> int:
    """Return the most blocks in which `num_tokens` consecutive tokens lie, wherever in a block the first one is."""
    return (num_tokens + block_size - 2) // block_size + 1


def max_blocks_of_group(
    num_prompt_tokens: int, max_tokens: int, num_sequences: int, block_size: int, max_live_tokens: int | None = None
) -> int:
    """Return the most blocks that a request can hold at once: full prompt blocks shared, one tail for each sequence.

    The last token that a sequence produces is never written to the cache, so a tail holds `max_tokens - 1` of them.
    `max_live_tokens`: most tokens of one sequence that are in blocks at once (None: all of them).
    """
    num_shared = num_prompt_tokens // block_size if num_sequences > 1 else 0
    tail_tokens = num_prompt_tokens - num_shared * block_size + max_tokens - 1
    tail = num_blocks_for(tail_tokens, block_size)
    if max_live_tokens is None:
        return num_shared + num_sequences * tail
    most = num_blocks_touched(max_live_tokens, block_size)
    return min(min(num_shared, most) + num_sequences * min(tail, most), num_sequences * most)
