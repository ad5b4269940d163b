"""Logits in pieces: what is worked on at once stays in cache, and scratch has a bound."""

from __future__ import annotations

from collections.abc import Iterator


def rows_per_chunk(vocab_size: int, chunk_bytes: int) -> int:
    """Rows of float32 logits in a chunk, at least one."""
    return max(1, chunk_bytes // (4 * vocab_size))


def chunks(count: int, size: int) -> Iterator[tuple[int, int]]:
    """(start, end) of consecutive pieces of at most `size`."""
    return ((start, min(start + size, count)) for start in range(0, count, size))
