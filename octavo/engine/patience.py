"""How long requests wait while no core is ready: without limit for cores that the front starts again by itself."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

from octavo.core.messages import EngineCoreOutput
from octavo.engine.dispatch import Dispatch
from octavo.engine.replica import Replica
from octavo.errors import EngineRestartingError

PATIENCE_S: Final = 5.0
"""How long new requests wait for an engine on another machine: a connection is tried at least as often."""


class Patience:
    """Ends requests that wait too long, and refuses new ones."""

    def __init__(self, dispatch: Dispatch, replicas: Sequence[Replica], most_wait_s: float = math.inf) -> None:
        """replicas: those that `dispatch` sends to, of which others may be added and removed.

        most_wait_s: how long requests that have begun wait while none is ready; new ones then wait for `PATIENCE_S`,
        later not at all. inf: all wait until one is ready.
        """
        self._dispatch = dispatch
        self._replicas = replicas
        self._most_wait_s = most_wait_s
        self._limiting: asyncio.Task[None] | None = None
        self._is_over = False

    @property
    def absence(self) -> EngineRestartingError:
        """The error of requests while no core is ready; it names what is missing."""
        if self._most_wait_s == math.inf:
            return EngineRestartingError("the engine core is being started again; try again in a few seconds")
        kind, count = "decode engine" if self._dispatch.split is not None else "engine", len(self._replicas)
        found = f"none of the {count} that it uses is connected" if count else "it has none to use"
        return EngineRestartingError(f"the server has no {kind}: {found}; try again in a few seconds")

    def check(self, most_waiting: int) -> None:
        """Raise EngineRestartingError when a new request may not wait, or as many as this wait."""
        if self._dispatch.is_any_ready:
            return
        if self._is_over or not self._replicas:
            raise self.absence
        if self._dispatch.num_waiting() >= most_waiting:
            raise EngineRestartingError(f"{most_waiting} requests wait already: {self.absence}")

    def update(self, tasks: asyncio.TaskGroup, refuse: Callable[[list[EngineCoreOutput]], Awaitable[None]]) -> None:
        """Begin to limit the waiting, with a task, when the last core is lost, and end that when one is ready.

        refuse: sends the last outputs of requests.
        """
        if self._dispatch.is_any_ready:
            self._is_over = False
            if self._limiting is not None:
                self._limiting.cancel()
                self._limiting = None
        elif self._limiting is None and self._most_wait_s < math.inf:
            self._limiting = tasks.create_task(self._limit(refuse))

    async def _limit(self, refuse: Callable[[list[EngineCoreOutput]], Awaitable[None]]) -> None:
        patience_s = min(PATIENCE_S, self._most_wait_s)
        await asyncio.sleep(patience_s)
        self._is_over = True
        await refuse(self._dispatch.refuse_waiting(self.absence, begun=False))
        await asyncio.sleep(self._most_wait_s - patience_s)
        await refuse(self._dispatch.refuse_waiting(self.absence, begun=True))
