"""The requests that are open, each of which can be ended from outside with a reason."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.types import Receive

from octavo.server.errors import ClientDisconnectedError


class _OpenRequest:
    """The task of one request, and the reason why it has to end early (None while there is none)."""

    def __init__(self, task: asyncio.Task[object]) -> None:
        self.task = task
        self.reason: Exception | None = None

    def end(self, reason: Exception) -> None:
        if self.reason is None:
            self.reason = reason
            self.task.cancel()

    async def end_on_disconnect(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self.end(ClientDisconnectedError())


class OpenRequests:
    """All requests in progress. `started` is set while there is one.

    All methods run on the event loop.
    """

    def __init__(self) -> None:
        self.started = asyncio.Event()
        self._open: set[_OpenRequest] = set()

    def __len__(self) -> int:
        return len(self._open)

    @asynccontextmanager
    async def track(self, receive: Receive) -> AsyncIterator[None]:
        """End the body of the `with` with ClientDisconnectedError when the client closes its connection.

        The request's body must have been read: `receive` then only returns when the client has closed its connection.
        """
        task = asyncio.current_task()
        assert task is not None
        entry = _OpenRequest(task)
        self._open.add(entry)
        self.started.set()
        watcher = asyncio.create_task(entry.end_on_disconnect(receive))
        try:
            yield
        except asyncio.CancelledError:
            if entry.reason is None:
                raise
            # cancelled by `end`: the task continues, with the reason as an ordinary exception
            task.uncancel()
            raise entry.reason from None
        finally:
            watcher.cancel()
            self._open.discard(entry)
            if not self._open:
                self.started.clear()

    def end_all(self, reason: Exception) -> None:
        """End every request in progress with this exception."""
        for entry in list(self._open):
            entry.end(reason)
