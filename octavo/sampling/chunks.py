"""Cuts logits into pieces that stay in cache, and so bounds the scratch memory; or by the sampler of each row."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from torch import Tensor

from octavo.sampling.metadata import RowSamples, SamplingRow

Sample = Callable[[Tensor, Sequence[SamplingRow]], list[RowSamples]]
"""`octavo.sampling.sampler.Sampler.sample`."""


def rows_per_chunk(vocab_size: int, chunk_bytes: int) -> int:
    """Return how many rows of float32 logits fit in a chunk, at least one."""
    return max(1, chunk_bytes // (4 * vocab_size))


def chunks(count: int, size: int) -> Iterator[tuple[int, int]]:
    """Yield (start, end) of consecutive pieces of at most `size`."""
    return ((start, min(start + size, count)) for start in range(0, count, size))


def sampled_apart(
    logits: Tensor, rows: Sequence[SamplingRow], are_first: Sequence[bool], first: Sample, others: Sample
) -> list[RowSamples]:
    """Return the results of rows of `logits`, float32 [rows, vocab], of which `first` samples those that `are_first`,
    and `others` all others."""
    results: dict[int, RowSamples] = {}
    for sample, wanted in ((first, True), (others, False)):
        places = [place for place, is_first in enumerate(are_first) if is_first is wanted]
        if not places:
            continue
        if len(places) == len(rows):  # nothing is copied
            return sample(logits, rows)
        results |= zip(places, sample(logits[places], [rows[place] for place in places]), strict=True)
    return [results[place] for place in range(len(rows))]
