"""How fast a response comes, for `octavo run` and `octavo chat` with --verbose."""

from __future__ import annotations

import time
from collections.abc import Callable


class Pace:
    """The times of the first and the last token of a response, counted from when this is made."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        """clock: seconds."""
        self._clock = clock
        self._begin = self._first = self._last = clock()
        self.num_tokens = self._num_first = 0
        """Tokens so far, and those that came first."""

    def note(self, num_tokens: int) -> None:
        """Note that the response has so many tokens now."""
        if num_tokens <= self.num_tokens:
            return
        self._last = self._clock()
        if not self.num_tokens:
            self._first, self._num_first = self._last, num_tokens
        self.num_tokens = num_tokens

    def __str__(self) -> str:
        if not self.num_tokens:
            return "no tokens"
        begun = f"{self.num_tokens} tokens, the first after {self._first - self._begin:.2f} s"
        seconds = self._last - self._first
        return f"{begun}, then {(self.num_tokens - self._num_first) / seconds:.1f} per second" if seconds else begun
