"""Proposers that are always right, always wrong, or neither."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping

from octavo.core.sequence import Sequence, SequenceGroup

Outputs = Callable[[SequenceGroup], Mapping[int, list[int]]]
"""The tokens that a request gives by itself, by the index of the sequence."""


class ToyProposer:
    """Proposes up to `most` tokens, each of them right with probability `rightness`."""

    def __init__(self, outputs: Outputs, rightness: float, most: int = 4, vocab_size: int = 50, seed: int = 0) -> None:
        self._outputs = outputs
        self._rightness = rightness
        self._most = most
        self._vocab_size = vocab_size
        self._random = random.Random(seed)
        self.num_proposed = 0

    def note_forced(self, group: SequenceGroup, sequence: Sequence, tokens: tuple[int, ...], num_known: int) -> None:
        raise AssertionError("nothing has a grammar here")

    def begin_step(self, num_rows: int) -> bool:
        return True

    def note_step(self, num_tokens: int, seconds: float) -> None:
        assert num_tokens > 0

    def propose(self, group: SequenceGroup, sequence: Sequence, max_drafts: int) -> list[int]:
        assert max_drafts > 0
        done = sequence.num_output_tokens
        count = min(self._random.randint(0, self._most) if 0 < self._rightness < 1 else self._most, max_drafts)
        right = self._outputs(group).get(sequence.index, [])[done : done + count]
        self.num_proposed += len(right)
        return [token if self._random.random() < self._rightness else (token + 1) % self._vocab_size for token in right]
