"""What one rendering of a chat template may cost, and what is left of it."""

from __future__ import annotations

import time
from typing import Final, NamedTuple

SIZE_OF_STEP: Final = 64
"""Characters or entries that cost one step."""

_STEPS_BETWEEN_CLOCKS: Final = 64


class RenderLimits(NamedTuple):
    """What one rendering may cost. seconds: of processor time, as a busy machine makes no template slower.
    value_size: characters or entries of any one value, the rendered text included."""

    steps: int = 1_000_000
    seconds: float = 5.0
    value_size: int = 4 << 20


class RenderLimitReached(Exception):
    """A rendering has cost more than it may; the message names the limit."""


class RenderBudget:
    """What is left of the limits of one rendering."""

    def __init__(self, limits: RenderLimits) -> None:
        self.limits = limits
        self._steps = limits.steps
        self._next_look = limits.steps - _STEPS_BETWEEN_CLOCKS
        self._end = time.thread_time() + limits.seconds

    def spend(self, steps: int = 1) -> bool:
        """Subtract steps, and return True. Raises RenderLimitReached."""
        self._steps -= steps
        if self._steps < self._next_look:
            self._next_look = self._steps - _STEPS_BETWEEN_CLOCKS
            if self._steps < 0:
                raise RenderLimitReached(f"it takes more than {self.limits.steps:,} steps")
            if time.thread_time() > self._end:
                raise RenderLimitReached(f"it takes more than {self.limits.seconds:g} s of processor time")
        return True

    def take(self, size: int) -> None:
        """Charge a value with this many characters or entries, before it is made where that can be known."""
        if size > self.limits.value_size:
            raise RenderLimitReached(f"it makes a value of more than {self.limits.value_size:,} characters or entries")
        self.spend(1 + size // SIZE_OF_STEP)
