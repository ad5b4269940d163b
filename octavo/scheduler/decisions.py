"""The last decisions of the scheduler with their reasons, in a ring."""

from __future__ import annotations

import heapq
from collections import deque
from itertools import islice

from octavo.core.messages import Decision, EngineCoreRequest


class DecisionLog:
    """Keeps the last `size` decisions, and apart from them the last `num_refused` refusals, so that a flood of refusals
    removes nothing else.

    A step notes what blocks the first waiting group, and not what blocks those behind it.
    """

    def __init__(self, size: int = 1024, num_refused: int = 256) -> None:
        self._decisions: deque[Decision] = deque(maxlen=size)
        self._refusals: deque[Decision] = deque(maxlen=num_refused)
        self._ongoing: dict[tuple[str, str], Decision] = {}
        self.step = 0
        self.now = 0.0

    @property
    def entries(self) -> list[Decision]:
        """All decisions, oldest first."""
        return list(heapq.merge(self._decisions, self._refusals, key=lambda entry: (entry.step, entry.time)))

    def recent(self, since: float, most: int) -> list[Decision]:
        """Return decisions of this time or later, and those that go on, oldest first: at most `most`, and as many
        refusals."""
        found = [
            entry
            for log in (self._decisions, self._refusals)
            for entry in islice(reversed(log), most)
            if entry.time >= since or entry.last_step >= self.step - 1 > entry.step
        ]
        return sorted(found, key=lambda entry: (entry.step, entry.time))

    def begin(self, step: int, now: float) -> None:
        """Set the step and the time of the decisions that follow."""
        self.step, self.now = step, now
        for key in [key for key, entry in self._ongoing.items() if entry.last_step < step - 1]:
            del self._ongoing[key]

    def note(self, kind: str, request: EngineCoreRequest, because: str = "") -> None:
        """Keep a decision. A request that is blocked, or passed, step after step has one entry with the last reason."""
        entry = self._ongoing.get((kind, request.request_id))
        if entry is not None:
            entry.last_step, entry.because = self.step, because
            return
        entry = Decision(
            step=self.step,
            last_step=self.step,
            time=self.now,
            kind=kind,
            request_id=request.request_id,
            tenant=request.tenant,
            because=because,
        )
        (self._refusals if kind == "refused" else self._decisions).append(entry)
        if kind in ("blocked", "passed"):
            self._ongoing[kind, request.request_id] = entry
