"""The paper's tables on a small scale: what waste and sharing must look like, and the allocator that is compared."""

from __future__ import annotations

import itertools
import random

import pytest

from benchmarks.paged_attention_paper import (
    BASELINES,
    DATA_SETS,
    NUM_SLOTS,
    Buddies,
    contiguous_shares,
    paged_shares,
    saving,
    workload,
)
from octavo.simulate.traces import generate


def test_buddies_give_chunks_that_do_not_overlap_and_join_again() -> None:
    source = random.Random(0)
    buddies = Buddies(NUM_SLOTS)
    chunks: list[tuple[int, int]] = []
    for _ in range(2000):
        if chunks and source.random() < 0.45:
            buddies.free(chunks.pop(source.randrange(len(chunks))))
            continue
        size = source.randrange(1, 2000)
        chunk = buddies.allocate(size)
        if chunk is not None:
            assert chunk[1] >= size
            chunks.append(chunk)
        slots = sorted((start, start + length) for start, length in chunks)
        assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(slots))
        assert all(0 <= start < end <= NUM_SLOTS for start, end in slots)
    for chunk in chunks:
        buddies.free(chunk)
    assert buddies.allocate(8192) == (0, 8192)
    assert buddies.allocate(8192) is None


@pytest.mark.parametrize("label", sorted(BASELINES))
def test_contiguous_systems_waste_most_of_the_cache(label: str) -> None:
    requests = generate(workload(DATA_SETS["ShareGPT"], 60, 0.8), seed=1)
    shares = contiguous_shares(requests, BASELINES[label][1])
    assert sum(shares) == pytest.approx(1.0)
    assert 0.15 < shares.tokens < 0.45


def test_paging_wastes_less_than_four_per_cent_within_blocks() -> None:
    shares = paged_shares(generate(workload(DATA_SETS["ShareGPT"], 120, 0.8), seed=1))
    assert sum(shares) == pytest.approx(1.0)
    assert shares.internal / (shares.internal + shares.tokens) < 0.04
    assert shares.tokens > 0.93


def test_wider_requests_share_more_and_beams_most() -> None:
    def saved(width: int, *, beam: bool) -> float:
        requests = generate(workload(DATA_SETS["Alpaca"], 8, 0.5, width=width, beam=beam), seed=1)
        return saving(requests, candidate_spread=0.15, num_slots=2000)

    assert 0 < saved(2, beam=False) < saved(4, beam=False) < saved(4, beam=True) < 0.75
