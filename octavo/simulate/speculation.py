"""Speculation in simulated time: guesses of the next tokens are right with a given probability."""

from __future__ import annotations

import random

import msgspec

from octavo.config.schema import SpeculativeConfig
from octavo.core.sequence import Sequence, SequenceGroup
from octavo.simulate.executor import SimulatedExecutor
from octavo.speculation.source import Guess
from octavo.speculation.speculation import Speculation


class Guessing(msgspec.Struct, frozen=True):
    """Speculation in a simulation. acceptance: the probability that a guess is right if all guesses before it are
    right."""

    config: SpeculativeConfig
    acceptance: float

    def proposer(self, executor: SimulatedExecutor) -> Speculation:
        """Return the proposer of a replica, which learns costs and acceptance as that of an engine does."""
        # the host takes no time in a simulation
        return Speculation(self.config, clock=lambda: 0.0, sources=(_Scripted(self, executor),))


class _Scripted:
    """A `GuessSource` that knows what comes, and errs with the given probability."""

    def __init__(self, guessing: Guessing, executor: SimulatedExecutor) -> None:
        self._most, self._acceptance = guessing.config.num_speculative_tokens, guessing.acceptance
        self._executor = executor

    def begin(self, group: SequenceGroup, sequence: Sequence) -> None:
        """Nothing is kept."""

    def guess(self, group: SequenceGroup, sequence: Sequence) -> Guess | None:
        place, seed = sequence.num_output_tokens, group.request.params.seed
        source, most = random.Random(f"{seed} {sequence.index} {place}"), self._most
        num_right = next((i for i in range(most) if source.random() >= self._acceptance), most)
        tokens = self._executor.output_tokens(group.request, sequence.index, place, num_right)
        return Guess(tokens + [-1] * (most - len(tokens)), "given", len(sequence.token_ids))
