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
    make_requests,
    paged_shares,
    saving,
    widened,
)
from octavo.simulate.traces import TraceRequest


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
    shares = contiguous_shares(make_requests(DATA_SETS["ShareGPT"], 60, 0.8, seed=1), BASELINES[label])
    assert sum(shares[:4]) == pytest.approx(1.0)
    assert 0.15 < shares.tokens < 0.45
    # the largest power of two in the cache holds seven of the greatest length
    assert shares.num_running == 7 if label == "max" else shares.num_running > 7


def test_paging_wastes_less_than_four_per_cent_within_blocks() -> None:
    shares = paged_shares(make_requests(DATA_SETS["ShareGPT"], 120, 0.8, seed=1))
    assert sum(shares[:4]) == pytest.approx(1.0)
    assert shares.waste < 0.04
    assert shares.tokens > 0.93


def test_what_blocks_waste_is_half_of_one_for_each_sequence() -> None:
    requests = make_requests(DATA_SETS["Alpaca"], 100, 0.8, seed=1)
    shares = {size: paged_shares(requests, size) for size in (4, 16)}
    for size, each in shares.items():
        wasted_slots = each.internal * NUM_SLOTS / each.num_running
        assert wasted_slots == pytest.approx((size - 1) / 2, rel=0.15)


def test_wider_requests_share_more_and_beams_most() -> None:
    requests = make_requests(DATA_SETS["Alpaca"], 8, 0.5, seed=1)

    def saved(width: int, *, beam: bool) -> float:
        return saving(widened(requests, width, beam=beam), candidate_spread=0.15, num_slots=2000).unbound

    assert 0 < saved(2, beam=False) < saved(4, beam=False) < saved(4, beam=True) < 0.75


def test_sequences_of_one_length_share_what_the_prompt_is_of_them() -> None:
    """Three blocks of prompt, outputs that grow to three more: on average each sequence has five."""
    requests = [TraceRequest(num_prompt_tokens=48, output_len=48) for _ in range(4)]
    saved = saving(widened(requests, 2, beam=False), num_slots=320)
    assert saved.unbound == pytest.approx(3 / (2 * 5), abs=0.02)
