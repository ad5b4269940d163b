"""In which steps text is searched for guesses: looking takes time on the host, also where nothing is found."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Final

from octavo.speculation.length import MEMORY, OUTLIER

_MOST_CREDIT: Final = 32.0
"""Searches that may bring nothing before they become seldom."""
_SHARE: Final = 0.0025
"""Share of the time of steps that searches take where they bring nothing. What they push out of the processor's caches
takes about as long again."""
_BESIDE_S: Final = 2e-5
"""The extra seconds that a step with a search takes elsewhere on the host."""
_LONGEST_PAUSE: Final = 64
"""Steps from one search to the next, at most."""


class SearchPace:
    """Decides which steps search. A search earns the time that its guesses are expected to save, and costs its own;
    without credit so few steps search that it takes `_SHARE` of their time."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        """clock: seconds of the host."""
        self.clock = clock
        self._credit = _MOST_CREDIT
        self._search_s: float | None = None
        self.spent_s = 0.0
        """Seconds that the present search has taken so far."""
        self.num_left = 0
        """How many of the next steps are not searched."""

    @property
    def search_s(self) -> float:
        """Return the seconds that a step with a search takes longer on the host; 0 before one was measured."""
        return self._search_s or 0.0

    def take_step(self) -> bool:
        """Begin a step. Returns whether it searches."""
        if self.num_left:
            self.num_left -= 1
            return False
        return True

    def note_spent(self, began: float) -> None:
        """Count the time since `began` for the present search."""
        self.spent_s += self.clock() - began

    def note_searched(self, gain_s: float, step_s: float) -> None:
        """End the present search. gain_s: seconds that the guesses it gave are expected to save. step_s: of a step
        without guesses."""
        spent, self.spent_s = self.spent_s, 0.0
        known = self._search_s
        if known is not None:
            spent = MEMORY * known + (1 - MEMORY) * min(spent, OUTLIER * known)
        self._search_s = spent
        if spent <= 0:
            return
        self._credit = min(_MOST_CREDIT, max(0.0, self._credit - 1 + gain_s / spent))
        if not self._credit:
            self.num_left = min(_LONGEST_PAUSE, math.ceil((spent + _BESIDE_S) / (_SHARE * step_s))) - 1
