"""The requests that are open, each of which can be ended from outside with a reason."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from starlette.types import Receive

from octavo.server.errors import ClientDisconnectedError


class OpenRequests:
    """All requests in progress. `started` is set while there is one. is_closing: the server stops, and streams that
    have no end of their own are to end.

    All methods run on the event loop.
    """

    def __init__(self) -> None:
        self.started = asyncio.Event()
        self.is_closing = False
        # the reason why the task of a request has to end early; None while there is none
        self._reasons: dict[asyncio.Task[Any], Exception | None] = {}

    def __len__(self) -> int:
        return len(self._reasons)

    @asynccontextmanager
    async def track(self, receive: Receive) -> AsyncIterator[None]:
        """End the body of the `with` with ClientDisconnectedError when the client closes its connection.

        The request's body must have been read: `receive` then only returns when the client has closed its connection.
        """
        task = asyncio.current_task()
        assert task is not None
        self._reasons[task] = None
        self.started.set()
        watcher = asyncio.create_task(self._end_on_disconnect(task, receive))
        try:
            yield
        except asyncio.CancelledError:
            reason = self._reasons[task]
            if reason is None:
                raise
            # cancelled by `_end`: the task continues, with the reason as an ordinary exception
            task.uncancel()
            raise reason from None
        finally:
            watcher.cancel()
            del self._reasons[task]
            if not self._reasons:
                self.started.clear()

    def end_all(self, reason: Exception) -> None:
        """End every request in progress with this exception."""
        for task in list(self._reasons):
            self._end(task, reason)

    def _end(self, task: asyncio.Task[Any], reason: Exception) -> None:
        if self._reasons[task] is None:
            self._reasons[task] = reason
            task.cancel()

    async def _end_on_disconnect(self, task: asyncio.Task[Any], receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._end(task, ClientDisconnectedError())
