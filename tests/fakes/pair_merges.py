"""Vocabularies that are learned as those of releases are: the most frequent pair of neighbours becomes one token."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from typing import TypeVar

Part = TypeVar("Part", str, bytes)


def merged_pairs(words: Sequence[Sequence[Part]], num_merges: int) -> list[Part]:
    """Return the pairs that are joined, in that order, in `words`, each a list of parts."""
    cut, made = [list(word) for word in words], []
    for _ in range(num_merges):
        counts = Counter(pair for word in cut for pair in pairwise(word))
        (left, right), _count = max(counts.items(), key=lambda each: (each[1], each[0]))
        made.append(left + right)
        for word in cut:
            at = 0
            while at < len(word) - 1:
                if word[at] == left and word[at + 1] == right:
                    word[at : at + 2] = [left + right]
                at += 1
    return made
