"""Why a request was, or was not, part of a step: the last decisions in a ring."""

from __future__ import annotations

import heapq
from collections import deque

from octavo.core.messages import Decision, EngineCoreRequest


class DecisionLog:
    """The last `size` decisions, and the last `num_refused` refusals: a flood of them pushes nothing else out.

    Of the waiting groups only the first one's blocker is named, not every row's.
    """

    def __init__(self, size: int = 1024, num_refused: int = 256) -> None:
        self._decisions: deque[Decision] = deque(maxlen=size)
        self._refusals: deque[Decision] = deque(maxlen=num_refused)
        self._goes_on: dict[tuple[str, str], Decision] = {}
        self.step = 0
        self.now = 0.0

    @property
    def entries(self) -> list[Decision]:
        """All of them, oldest first."""
        return list(heapq.merge(self._decisions, self._refusals, key=lambda entry: (entry.step, entry.time)))

    def begin(self, step: int, now: float) -> None:
        """What follows belongs to this step."""
        self.step, self.now = step, now
        for key in [key for key, entry in self._goes_on.items() if entry.last_step < step - 1]:
            del self._goes_on[key]

    def note(self, kind: str, request: EngineCoreRequest, because: str = "") -> None:
        """Keep a decision. Being blocked, or passed, step after step is one entry with the last reason."""
        entry = self._goes_on.get((kind, request.request_id))
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
            self._goes_on[kind, request.request_id] = entry
