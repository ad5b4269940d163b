"""Proposers that are always right, always wrong, or neither, and one that takes all it can get."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping

from octavo.config.schema import SpeculativeConfig
from octavo.config.speculative_args import METHODS, MODEL_METHODS
from octavo.core.sequence import Sequence, SequenceGroup
from octavo.core.step import Proposals
from octavo.engine.engine_core import EngineCore
from octavo.scheduler.draft_choices import NotedChoices
from octavo.speculation.speculation import Drafting, Speculation

LOOKUPS = [method for method in METHODS if method not in (*MODEL_METHODS, "grammar")]
"""Methods whose guesses the host makes of tokens; those of `grammar` need a form."""

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
        self.num_known = 0

    def note_forced(self, group: SequenceGroup, sequence: Sequence, tokens: tuple[int, ...], num_known: int) -> None:
        raise AssertionError("nothing has a grammar here")

    def note_proposed(self, group: SequenceGroup, sequence: Sequence, tokens: tuple[int, ...], num_known: int) -> None:
        assert 0 < len(tokens) <= self._most
        # those of a draft model in the worker are not used here; it is its slots that matter
        self.num_known = max(self.num_known, num_known)

    def note_drafting(self, num_rows: int, num_passes: int, seconds: float) -> None:
        raise AssertionError("no draft model runs here")

    def proposals(self, num_rows: int) -> Proposals:
        return Proposals(
            self._random.randint(0, self._most), self._random.randint(0, num_rows + 1), self._random.random() < 0.5
        )

    def drafts_prompt(self, num_computed: int) -> bool:
        return self._random.random() < 0.5

    def take_rest(self) -> bool:
        return False

    def begin_step(self, num_rows: int) -> bool:
        return True

    def note_step(self, num_tokens: int, seconds: float, num_plain: int) -> None:
        assert num_tokens > 0

    def note_drawn(self, num_rows: int, num_drawn: int, seconds: float) -> None:
        assert num_rows > 0

    def propose(self, group: SequenceGroup, sequence: Sequence, max_drafts: int) -> list[int]:
        assert max_drafts > 0
        done = sequence.num_output_tokens
        count = min(self._random.randint(0, self._most) if 0 < self._rightness < 1 else self._most, max_drafts)
        right = self._outputs(group).get(sequence.index, [])[done : done + count]
        self.num_proposed += len(right)
        return [token if self._random.random() < self._rightness else (token + 1) % self._vocab_size for token in right]


class EagerSpeculation(Speculation):
    """The proposer of an engine, which takes guesses whether they pay or not: as many as fit, or some of them."""

    def __init__(self, config: SpeculativeConfig, seed: int | None = None) -> None:
        """seed: of the choice how many; None for all of them."""
        super().__init__(config)
        self._most = config.num_speculative_tokens
        self._random = None if seed is None else random.Random(seed)

    def proposals(self, num_rows: int) -> Proposals:
        catches_up = self._config.method == "draft_model" and bool(self._some(3))
        return Proposals(self._some(self._most), self._some(num_rows + 1), catches_up)

    def drafts_prompt(self, num_computed: int) -> bool:
        return bool(self._some(3))

    def begin_step(self, num_rows: int) -> bool:
        return bool(self._some(3))

    def propose(self, group: SequenceGroup, sequence: Sequence, max_drafts: int) -> list[int]:
        state = sequence.attached(Drafting) or self._begin(group, sequence)
        guess = self._guess(group, sequence, state)
        return [] if guess is None else guess.tokens[: self._some(max_drafts)]

    def _some(self, most: int) -> int:
        return most if self._random is None else self._random.randint(0, most)


def take_all(core: EngineCore, config: SpeculativeConfig, seed: int | None = None) -> None:
    """Let an engine that speculates take guesses whether they pay or not."""
    rows, drafts = core.scheduler._rows, core.scheduler._drafts
    assert drafts is not None
    eager = EagerSpeculation(config, seed)
    if isinstance(rows._proposer, NotedChoices):
        NotedChoices.__init__(rows._proposer, eager)
    else:
        rows._proposer = drafts._proposer = eager
