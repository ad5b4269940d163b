"""Why a request was, or was not, part of a step: the last decisions in a ring."""

from __future__ import annotations

from collections import deque

from octavo.core.messages import Decision


class DecisionLog:
    """The last `size` decisions. Of the waiting groups only the first one's blocker is named, not every row's."""

    def __init__(self, size: int = 1024) -> None:
        self.entries: deque[Decision] = deque(maxlen=size)
        self.step = 0
        self.now = 0.0

    def begin(self, step: int, now: float) -> None:
        """What follows belongs to this step."""
        self.step, self.now = step, now

    def note(self, kind: str, request_id: str, because: str = "") -> None:
        """Keep a decision."""
        last = self.entries[-1] if self.entries else None
        if last is not None and kind == "blocked" == last.kind and last.request_id == request_id:
            last.last_step, last.because = self.step, because
            return
        self.entries.append(
            Decision(
                step=self.step,
                last_step=self.step,
                time=self.now,
                kind=kind,
                request_id=request_id,
                because=because,
            )
        )
