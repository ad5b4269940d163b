"""Speculation in simulated time: guesses of the next tokens are right with a given probability."""

from __future__ import annotations

import random

import msgspec

from octavo.config.schema import SpeculativeConfig
from octavo.core.sequence import Sequence, SequenceGroup
from octavo.simulate.executor import SimulatedExecutor
from octavo.speculation.speculation import Drafting, Guess, Speculation


class Guessing(msgspec.Struct, frozen=True):
    """Speculation in a simulation. acceptance: the probability that a guess is right if all guesses before it are
    right."""

    config: SpeculativeConfig
    acceptance: float

    def proposer(self, executor: SimulatedExecutor) -> Speculation:
        """Return the proposer of a replica, which learns costs and acceptance as that of an engine does."""
        return _Given(self.config, self.acceptance, executor)


class _Given(Speculation):
    def __init__(self, config: SpeculativeConfig, acceptance: float, executor: SimulatedExecutor) -> None:
        super().__init__(config, clock=lambda: 0.0)  # the host takes no time in a simulation
        self._acceptance, self._executor = acceptance, executor

    def look_up(self, group: SequenceGroup, sequence: Sequence, state: Drafting) -> Guess | None:
        place, seed = sequence.num_output_tokens, group.request.params.seed
        source, most = random.Random(f"{seed} {sequence.index} {place}"), self._config.num_speculative_tokens
        num_right = next((i for i in range(most) if source.random() >= self._acceptance), most)
        tokens = self._executor.output_tokens(group.request, sequence.index, place, num_right)
        return Guess(tokens + [-1] * (most - len(tokens)), "given", len(sequence.token_ids))
