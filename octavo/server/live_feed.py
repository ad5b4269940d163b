"""Reports of the engine's state for all that watch it.

The cores make a report when one is asked for: nothing is done while no client watches, and all that watch share the
reports. The pause between reports is so long that cores spend at most `_MOST_SHARE` of their time on them.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Final, TypeVar

import msgspec

from octavo.core.live import LiveState
from octavo.errors import EngineRestartingError

if TYPE_CHECKING:
    from octavo.async_llm import AsyncLLM

T = TypeVar("T")
INTERVAL_S: Final = 0.25
IDLE_INTERVAL_S: Final = 1.0
"""Seconds between two reports: the first while the engine computes, the second while it is idle."""
MOST_WATCHERS: Final = 16
_MOST_SHARE: Final = 0.005


class LiveFeed:
    """The reports that all watchers share. watchers: limits their number. pause_s: seconds until the next report."""

    def __init__(self) -> None:
        self.watchers = asyncio.Semaphore(MOST_WATCHERS)
        self.pause_s = INTERVAL_S
        self._lock = asyncio.Lock()
        self._taken_at = float("-inf")
        self._states: list[LiveState] = []

    async def states(self, llm: AsyncLLM) -> list[LiveState]:
        async with self._lock:
            if time.monotonic() - self._taken_at >= self.pause_s:
                self._states = await reports(llm, "live", 10 * (self.pause_s + IDLE_INTERVAL_S), LiveState)
                self._taken_at = time.monotonic()
                cost_s = max((state.cost_s for state in self._states), default=0.0)
                self.pause_s = max(INTERVAL_S, cost_s / _MOST_SHARE)
            return self._states


async def reports(llm: AsyncLLM, call: str, argument: float | list[int], kind: type[T]) -> list[T]:
    """Return the reply of each ready core to a call, as a struct of this kind."""
    try:
        return msgspec.convert(await llm.call(call, argument), list[kind])  # type: ignore[valid-type]
    except EngineRestartingError:
        return []
