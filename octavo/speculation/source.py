"""What a source of guesses does."""

from __future__ import annotations

from collections.abc import Hashable
from typing import NamedTuple, Protocol

from octavo.core.sequence import Sequence, SequenceGroup


class Guess(NamedTuple):
    """What may follow a sequence. kind: guesses of one kind are right about as often."""

    tokens: list[int]
    kind: Hashable
    num_known: int
    """Tokens of the sequence before the first guess."""

    def behind(self, known: list[int]) -> Guess | None:
        """Return the guesses behind all known tokens; None where those differ, or there are none."""
        drawn = known[self.num_known :]
        if len(drawn) >= len(self.tokens) or drawn != self.tokens[: len(drawn)]:
            return None
        return self._replace(tokens=self.tokens[len(drawn) :], num_known=len(known))


class GuessSource(Protocol):
    """Where guesses are looked for. What it keeps for one sequence is an `Attachment` of it."""

    def begin(self, group: SequenceGroup, sequence: Sequence) -> None:
        """Called once before the first `guess` for a sequence, but not for a fork, which has forks of attachments."""

    def guess(self, group: SequenceGroup, sequence: Sequence) -> Guess | None:
        """Return what may follow the known tokens; None where nothing is found. It counts into the time of searching,
        and is not called in each step: tokens may have come since the last call."""
