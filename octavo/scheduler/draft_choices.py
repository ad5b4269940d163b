"""Choices of a proposer, kept for a recording and repeated in a replay, which has no measured times."""

from __future__ import annotations

from typing import Any

import msgspec

from octavo.core.sequence import Sequence, SequenceGroup
from octavo.core.step import NO_PROPOSALS, Proposals
from octavo.scheduler.drafts import Proposer


class DraftChoices(msgspec.Struct, array_like=True):
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
        self.note_drawn, self.take_rest = proposer.note_drawn, proposer.take_rest
        self._choices = DraftChoices()

    def take(self) -> DraftChoices:
        """Return the answers since the last call."""
        choices, self._choices = self._choices, DraftChoices()
        return choices

    def begin_step(self, num_rows: int) -> bool:
        self._choices.may_draft = may_draft = self._proposer.begin_step(num_rows)
        return may_draft

    def proposals(self, num_rows: int) -> Proposals:
        self._choices.proposals = proposals = self._proposer.proposals(num_rows)
        return proposals

    def drafts_prompt(self, num_computed: int) -> bool:
        self._choices.prompts.append(drafts := self._proposer.drafts_prompt(num_computed))
        return drafts

    def propose(self, group: SequenceGroup, sequence: Sequence, max_drafts: int) -> list[int]:
        self._choices.drafts.append(drafts := self._proposer.propose(group, sequence, max_drafts))
        return drafts


class GivenChoices:
    """A proposer that gives the noted answers again."""

    def __init__(self) -> None:
        self.give(DraftChoices())

    def give(self, choices: DraftChoices) -> None:
        """Set the answers for the next step that is planned."""
        self._choices, self._drafts, self._prompts = choices, iter(choices.drafts), iter(choices.prompts)

    def take_rest(self) -> bool:
        return False  # a step without drafts is recorded as one

    def begin_step(self, num_rows: int) -> bool:
        return self._choices.may_draft

    def proposals(self, num_rows: int) -> Proposals:
        return self._choices.proposals

    def drafts_prompt(self, num_computed: int) -> bool:
        return next(self._prompts, False)

    def propose(self, group: SequenceGroup, sequence: Sequence, max_drafts: int) -> list[int]:
        # a step that differs from the recorded one may ask more often
        return next(self._drafts, [])

    def _learn_nothing(self, *observed: Any, **named: Any) -> None:
        """Ignore what a step has shown."""

    note_forced = note_proposed = note_drafting = note_step = note_drawn = _learn_nothing
