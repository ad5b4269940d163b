"""Spreads calls that thousands of clients cause at once over many turns of the event loop."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable


class FewPerTurn:
    """Makes calls in the order in which they come, at most `most` in each turn of the event loop.

    When thousands come at once, running streams are sent their tokens in between.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._waiting: deque[Callable[[], None]] = deque()
        self._num_made = 0

    def add(self, loop: asyncio.AbstractEventLoop, call: Callable[[], None]) -> None:
        """Make a call now, or in one of the next turns of the event loop."""
        if self._num_made == self._most:
            self._waiting.append(call)
            return
        if not self._num_made:
            loop.call_soon(self._next_turn, loop)
        self._num_made += 1
        call()

    def _next_turn(self, loop: asyncio.AbstractEventLoop) -> None:
        self._num_made = 0
        for _ in range(min(self._most, len(self._waiting))):
            self.add(loop, self._waiting.popleft())
