"""Cuts logits into pieces that stay in cache, and so bounds the scratch memory."""

from __future__ import annotations

from collections.abc import Iterator


def rows_per_chunk(vocab_size: int, chunk_bytes: int) -> int:
    """Return how many rows of float32 logits fit in a chunk, at least one."""
    return max(1, chunk_bytes // (4 * vocab_size))


def chunks(count: int, size: int) -> Iterator[tuple[int, int]]:
    """Yield (start, end) of consecutive pieces of at most `size`."""
    return ((start, min(start + size, count)) for start in range(0, count, size))
