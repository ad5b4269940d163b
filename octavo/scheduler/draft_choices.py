"""Choices of a proposer, kept for a recording and repeated in a replay, which has no measured times."""

from __future__ import annotations

from collections import deque
from typing import Any

import msgspec

from octavo.core.sequence import Sequence, SequenceGroup
from octavo.core.step import NO_PROPOSALS, Proposals
from octavo.scheduler.drafts import Proposer


class DraftChoices(msgspec.Struct, frozen=True, array_like=True):
    """The answers of a proposer while one step was planned. drafts, prompts: in the order of its questions."""

    may_draft: bool = False
    proposals: Proposals = NO_PROPOSALS
    drafts: list[list[int]] = []
    prompts: list[bool] = []


class NotedChoices:
    """Passes everything on to a proposer, and notes its answers."""

    def __init__(self, proposer: Proposer) -> None:
        self._proposer = proposer
        self.note_forced, self.note_proposed = proposer.note_forced, proposer.note_proposed
        self.note_drafting, self.note_step = proposer.note_drafting, proposer.note_step
        self.note_drawn = proposer.note_drawn
        self._may_draft, self._proposals = False, NO_PROPOSALS
        self._drafts: list[list[int]] = []
        self._prompts: list[bool] = []

    @property
    def num_resting(self) -> int:
        return self._proposer.num_resting

    @num_resting.setter
    def num_resting(self, count: int) -> None:
        self._proposer.num_resting = count

    def take(self) -> DraftChoices:
        """Return the answers since the last call."""
        choices = DraftChoices(self._may_draft, self._proposals, self._drafts, self._prompts)
        self._may_draft, self._proposals, self._drafts, self._prompts = False, NO_PROPOSALS, [], []
        return choices

    def begin_step(self, num_rows: int) -> bool:
        self._may_draft = self._proposer.begin_step(num_rows)
        return self._may_draft

    def proposals(self, num_rows: int) -> Proposals:
        self._proposals = self._proposer.proposals(num_rows)
        return self._proposals

    def drafts_prompt(self, num_computed: int) -> bool:
        self._prompts.append(self._proposer.drafts_prompt(num_computed))
        return self._prompts[-1]

    def propose(self, group: SequenceGroup, sequence: Sequence, max_drafts: int) -> list[int]:
        self._drafts.append(self._proposer.propose(group, sequence, max_drafts))
        return self._drafts[-1]


class GivenChoices:
    """A proposer that gives the noted answers again."""

    num_resting = 0

    def __init__(self) -> None:
        self._choices = DraftChoices()
        self._drafts: deque[list[int]] = deque()
        self._prompts: deque[bool] = deque()

    def give(self, choices: DraftChoices) -> None:
        """Answer with these while the next step is planned."""
        self._choices, self._drafts, self._prompts = choices, deque(choices.drafts), deque(choices.prompts)

    def begin_step(self, num_rows: int) -> bool:
        return self._choices.may_draft

    def proposals(self, num_rows: int) -> Proposals:
        return self._choices.proposals

    def drafts_prompt(self, num_computed: int) -> bool:
        return self._prompts.popleft() if self._prompts else False

    def propose(self, group: SequenceGroup, sequence: Sequence, max_drafts: int) -> list[int]:
        # a step that differs from the recorded one may ask more often
        return self._drafts.popleft() if self._drafts else []

    def _learn_nothing(self, *observed: Any, **named: Any) -> None:
        """Ignore what a step has shown."""

    note_forced = note_proposed = note_drafting = note_step = note_drawn = _learn_nothing
