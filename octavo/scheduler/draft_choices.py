"""What a proposer chose, noted for a recording, and given again in a replay, which has no measured times."""

from __future__ import annotations

from collections import deque

import msgspec

from octavo.core.sequence import Sequence, SequenceGroup
from octavo.core.step import NO_PROPOSALS, Proposals
from octavo.scheduler.drafts import Proposer


class DraftChoices(msgspec.Struct, frozen=True, array_like=True):
    """The answers of a proposer while one step was planned. drafts: in the order of its questions."""

    may_draft: bool = False
    proposals: Proposals = NO_PROPOSALS
    drafts: list[list[int]] = []


class NotedChoices:
    """Passes everything on to a proposer, and notes its answers."""

    def __init__(self, proposer: Proposer) -> None:
        self._proposer = proposer
        self.note_forced, self.note_proposed = proposer.note_forced, proposer.note_proposed
        self.note_drafting, self.note_step = proposer.note_drafting, proposer.note_step
        self._may_draft, self._proposals = False, NO_PROPOSALS
        self._drafts: list[list[int]] = []

    def take(self) -> DraftChoices:
        """Return the answers since the last call."""
        choices = DraftChoices(self._may_draft, self._proposals, self._drafts)
        self._may_draft, self._proposals, self._drafts = False, NO_PROPOSALS, []
        return choices

    def begin_step(self, num_rows: int) -> bool:
        self._may_draft = self._proposer.begin_step(num_rows)
        return self._may_draft

    def proposals(self, num_rows: int) -> Proposals:
        self._proposals = self._proposer.proposals(num_rows)
        return self._proposals

    def propose(self, group: SequenceGroup, sequence: Sequence, max_drafts: int) -> list[int]:
        self._drafts.append(self._proposer.propose(group, sequence, max_drafts))
        return self._drafts[-1]


class GivenChoices:
    """A proposer that gives the noted answers again."""

    def __init__(self) -> None:
        self._choices = DraftChoices()
        self._drafts: deque[list[int]] = deque()

    def give(self, choices: DraftChoices) -> None:
        """Answer with these while the next step is planned."""
        self._choices, self._drafts = choices, deque(choices.drafts)

    def begin_step(self, num_rows: int) -> bool:
        return self._choices.may_draft

    def proposals(self, num_rows: int) -> Proposals:
        return self._choices.proposals

    def propose(self, group: SequenceGroup, sequence: Sequence, max_drafts: int) -> list[int]:
        # a step that differs from the recorded one may ask more often
        return self._drafts.popleft() if self._drafts else []

    def note_forced(self, group: SequenceGroup, sequence: Sequence, tokens: tuple[int, ...], num_known: int) -> None:
        """Learn nothing."""

    def note_proposed(self, group: SequenceGroup, sequence: Sequence, tokens: tuple[int, ...], num_known: int) -> None:
        """Learn nothing."""

    def note_drafting(self, num_rows: int, num_passes: int, seconds: float) -> None:
        """Learn nothing."""

    def note_step(self, num_tokens: int, seconds: float) -> None:
        """Learn nothing."""
