"""The proposer of an engine: it takes guesses where its method finds some, and hands over as many as pay.

A guess is compared with what is drawn whether a step has verified it or not, so that how often guesses are right is
known before any costs time.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

import numpy as np
from numpy.typing import NDArray

from octavo.config.schema import SpeculativeConfig
from octavo.core.sequence import Sequence, SequenceGroup
from octavo.core.step import NO_PROPOSALS, Proposals
from octavo.speculation.length import MOST_TOKENS, Acceptance, StepBudget, StepCosts, Tally
from octavo.speculation.pace import SearchPace
from octavo.speculation.proposals import DraftCosts, ProposalLength
from octavo.speculation.source import Guess, GuessSource
from octavo.speculation.sources import SOURCES

_FORCED: Final = "forced"
_PROPOSED: Final = "draft model"


class Drafting:
    """What is kept for one sequence: its last guess, and how often guesses for it were right."""

    def __init__(self, tried: float = 0.0, right: float = 0.0) -> None:
        self.own = Tally(tried, right)
        self.guess: Guess | None = None
        self.given: dict[str, Guess] = {}
        """For each kind: the guess that came back with the last results."""

    def given_behind(self, known: list[int]) -> Guess | None:
        """Return what came back and agrees with the known tokens: what a form leaves no choice of, else what a model
        guesses."""
        for kind in (_FORCED, _PROPOSED) if self.given else ():
            given = self.given.get(kind)
            rest = None if given is None else given.behind(known)
            if rest is not None:
                return rest
        return None

    def fork(self) -> Drafting:
        return Drafting(self.own.tried, self.own.right)


class Speculation:
    """Guesses that came back with results, or that the sources of the method find on the host."""

    def __init__(
        self,
        config: SpeculativeConfig,
        clock: Callable[[], float] = time.perf_counter,
        *,
        sources: tuple[GuessSource, ...] | None = None,
        is_prefill: bool = False,
        repeats: bool = False,
    ) -> None:
        """clock: seconds of the host, by which the time of searching is counted. sources: None for those of the method.
        is_prefill: of a core that computes prompts for others. repeats: whether right guesses are computed again, as
        states need it."""
        self._num_resting = 0
        self._config = config
        self._sources = SOURCES[config.method](config) if sources is None else sources
        self._is_prefill, self._repeats = is_prefill, repeats
        self.costs = StepCosts(config.step_ms)
        self.acceptance = Acceptance()
        self._budget: StepBudget | None = None
        self._pace = SearchPace(clock)
        self._is_searching = False
        self._has_given = False
        """Whether guesses came back with results since the last step that could take them."""
        self._pays: dict[int, bool] = {}
        """Whether guesses may pay beside so many rows, by the present curve."""
        self._curve: NDArray[np.float64] | None = None
        self._draft_costs = DraftCosts()
        self._length: ProposalLength | None = None
        if config.has_model:
            most, catches_up = config.num_speculative_tokens, config.catches_up
            self._length = ProposalLength(most, catches_up=catches_up, repeats=repeats)

    def note_step(self, num_tokens: int, seconds: float, num_plain: int) -> None:
        pace = self._pace
        if self._length is not None:
            self._length.note_step(seconds, is_plain=num_plain > 0)
            # behind a prompt or passes of the draft model, which fill the processor's caches, a step takes longer
            if num_plain != 1:
                self.costs.note(num_tokens, seconds - pace.spent_s, num_alike=num_plain)
        elif self._is_searching:
            began = pace.clock()
            self.costs.note(num_tokens, seconds - pace.spent_s)
            pace.note_spent(began)
        elif not pace.num_left:  # the last one before a search
            self.costs.note(num_tokens, seconds)

    def note_drawn(self, num_rows: int, num_drawn: int, seconds: float) -> None:
        # sequences that came after the guesses may make more rows than there are measurements
        if self._length is not None and num_rows <= MOST_TOKENS:
            self._length.note_saved(num_drawn / num_rows * float(self.costs.seconds()[num_rows]) - seconds)

    def _rest(self) -> None:
        """Leave out the steps in which nothing would be looked for, or guessed; the last one is measured."""
        count = self._pace.num_left - 1
        if self._length is not None:
            count = min(count, self._length.num_left)
        if count > 0:
            self._num_resting = count
            self._pace.num_left -= count
            if self._length is not None:
                self._length.rest(count)

    def take_rest(self) -> bool:
        if not self._num_resting:
            return False
        self._num_resting -= 1
        return True

    def begin_step(self, num_rows: int) -> bool:
        """Begin to plan a step of `num_rows` sequences that decode. Returns whether guesses may pay in it."""
        if num_rows >= MOST_TOKENS:
            self._is_searching = False
            return False
        if self._is_searching and self._budget is not None:
            self._pace.note_searched(self._budget.gain_s, self._budget.step_s)
        self._is_searching = self._pace.take_step() or self._has_given
        if not self._is_searching:
            self._rest()
            return False
        began = self._pace.clock()
        self._has_given = False
        seconds = self.costs.seconds()
        if seconds is not self._curve:
            self._curve, self._pays = seconds, {}
        self._budget = StepBudget(seconds, num_rows, self._pace.search_s, repeats=self._repeats)
        if num_rows not in self._pays:
            self._pays[num_rows] = self._budget.may_pay
        self._pace.note_spent(began)
        return self._pays[num_rows]

    def proposals(self, num_rows: int) -> Proposals:
        if self._length is None or not num_rows:
            return NO_PROPOSALS
        kept = self._length.kept(num_rows)
        if kept is not None:
            return kept
        chances = self.acceptance.chances(_PROPOSED, Tally(), self._config.num_speculative_tokens)
        pass_s = self._draft_costs.pass_s(num_rows)
        return self._length.choose(self.costs.seconds(), num_rows, chances, pass_s)

    def note_drafting(self, num_rows: int, num_passes: int, seconds: float) -> None:
        assert self._length is not None, "only a draft model takes time"
        self._length.note_spent(seconds)
        if num_rows:
            self._draft_costs.note(num_rows, num_passes, seconds)
            self._length.note_measured()

    def drafts_prompt(self, num_computed: int) -> bool:
        return self._length is not None and (self._is_prefill or self._length.drafts_prompt(num_computed))

    def note_forced(self, group: SequenceGroup, sequence: Sequence, tokens: tuple[int, ...], num_known: int) -> None:
        self._note_given(group, sequence, Guess(list(tokens), _FORCED, num_known))

    def note_proposed(self, group: SequenceGroup, sequence: Sequence, tokens: tuple[int, ...], num_known: int) -> None:
        self._note_given(group, sequence, Guess(list(tokens), _PROPOSED, num_known))

    def _note_given(self, group: SequenceGroup, sequence: Sequence, guess: Guess) -> None:
        state = sequence.attached(Drafting) or self._begin(group, sequence)
        state.given[str(guess.kind)] = guess
        self._has_given, self._num_resting = True, 0

    def propose(self, group: SequenceGroup, sequence: Sequence, max_drafts: int) -> list[int]:
        assert self._budget is not None, "a step begins before guesses are made for it"
        began = self._pace.clock()
        state = sequence.attached(Drafting) or self._begin(group, sequence)
        self._compare(state, sequence)
        guess = state.guess = self._guess(group, sequence, state)
        count = 0
        if guess is not None:
            most = min(max_drafts, len(guess.tokens), self._config.num_speculative_tokens)
            acceptance, kind = self.acceptance, guess.kind
            by_place = kind == _PROPOSED
            chances = acceptance.chances(kind, state.own, most) if by_place else acceptance.probability(kind, state.own)
            count = self._budget.take(chances, most)
        self._pace.note_spent(began)
        return [] if guess is None else guess.tokens[:count]

    def _begin(self, group: SequenceGroup, sequence: Sequence) -> Drafting:
        state = Drafting()
        sequence.attach(state)
        for source in self._sources:
            source.begin(group, sequence)
        return state

    def _compare(self, state: Drafting, sequence: Sequence) -> None:
        """Compare the last guess with the tokens that are known by now, and count which were right."""
        guess, state.guess = state.guess, None
        if guess is None:
            return
        drawn = sequence.token_ids[guess.num_known : guess.num_known + len(guess.tokens)]
        num_right = next((i for i, token in enumerate(drawn) if token != guess.tokens[i]), len(drawn))
        num_tried = min(len(drawn), num_right + 1)
        self.acceptance.note(guess.kind, state.own, num_tried, num_right)
        if guess.kind == _PROPOSED:
            self.acceptance.note_places(guess.kind, num_tried, num_right)

    def _guess(self, group: SequenceGroup, sequence: Sequence, state: Drafting) -> Guess | None:
        """Return what may follow a sequence; None where nothing is known."""
        if (given := state.given_behind(sequence.token_ids)) is not None:
            return given
        for source in self._sources:
            if (guess := source.guess(group, sequence)) is not None:
                return guess
        return None
