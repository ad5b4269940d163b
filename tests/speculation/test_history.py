"""Lookup of the last tokens in a text."""

from __future__ import annotations

import random

import pytest

from octavo.speculation.history import History, Match


def test_the_latest_of_the_longest_occurrences_is_found() -> None:
    history = History([1, 2, 3, 9, 1, 2, 3, 8, 7, 2, 3])
    assert history.find([7, 2, 3], 2, is_own=True) == Match(7, 2)
    assert history.after(7, 2) == [8, 7]
    assert history.find([1, 2, 3], 2) == Match(7, 3)
    assert history.find([5, 2, 3], 3, is_own=True) is None
    assert history.find([3], 2) is None
    assert History().find([1, 2], 1) is None


def test_what_repeats_itself_goes_on() -> None:
    history = History([4, 1, 2, 1, 2])
    found = history.find([4, 1, 2, 1, 2], 2, is_own=True)
    assert found is not None
    assert history.after(found.end, 5) == [1, 2, 1, 2, 1]


@pytest.mark.parametrize("seed", range(5))
def test_a_search_finds_what_a_plain_loop_finds(seed: int) -> None:
    source = random.Random(seed)
    tokens = [source.randrange(4) for _ in range(200)]
    history = History(tokens)
    for longest in (1, 2, 5, 8):
        tail = tokens[-longest:]
        expected = None
        for length in range(1, longest + 1):
            ends = [end for end in range(length, len(tokens)) if tokens[end - length : end] == tail[-length:]]
            expected = Match(ends[-1], length) if ends else expected
        assert history.find(tail, 1, is_own=True) == expected


@pytest.mark.parametrize("piece", [1, 7, 100])
def test_what_is_appended_is_found(piece: int) -> None:
    tokens = [place * place % 1009 for place in range(2000)]
    history = History()
    history.extend(tokens[:2])
    for first in range(2, len(tokens), piece):
        history.extend(tokens[first : first + piece])
        end = max(2, first // 2)
        found = history.find(tokens[end - 2 : end], 2)
        assert found is not None
        assert tokens[found.end - 2 : found.end] == tokens[end - 2 : end]
    assert history.find([2000, 2001], 2) is None
