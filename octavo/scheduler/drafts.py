"""The extension point of speculative decoding: guesses of tokens, which the next row of a sequence verifies."""

from __future__ import annotations

from typing import Protocol

from octavo.core.sequence import Sequence, SequenceGroup


class Proposer(Protocol):
    """Proposes the tokens that may follow a sequence. What is generated does not depend on them, only how fast.

    With a proposer every group waits for results: a sequence's next row is planned when its tokens are known.
    A recording holds no drafts, so a run with a proposer cannot be replayed.
    """

    def propose(self, group: SequenceGroup, sequence: Sequence, max_drafts: int) -> list[int]:
        """Return at most `max_drafts` (at least 1) ids of the vocabulary that may follow the known tokens; or none."""
        ...
