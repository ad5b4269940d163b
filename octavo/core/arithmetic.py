"""Small sums about blocks, done in one place."""

from __future__ import annotations


def ceil_div(numerator: int, denominator: int) -> int:
    """Smallest integer not below numerator / denominator."""
    return -(-numerator // denominator)


def num_blocks_for(num_tokens: int, block_size: int) -> int:
    """Blocks that hold `num_tokens` token slots."""
    return -(-num_tokens // block_size)


def max_blocks_of_group(num_prompt_tokens: int, max_tokens: int, num_sequences: int, block_size: int) -> int:
    """Most blocks that a group can hold at once: full prompt blocks shared, one tail for each sequence.

    The last token that a sequence produces is never written to the cache, so a tail holds `max_tokens - 1` of them.
    """
    num_shared = num_prompt_tokens // block_size if num_sequences > 1 else 0
    tail_tokens = num_prompt_tokens - num_shared * block_size + max_tokens - 1
    return num_shared + num_sequences * num_blocks_for(tail_tokens, block_size)
