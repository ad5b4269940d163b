"""Ids of requests that the front has ended, of which cores may still send outputs."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterable
from contextlib import suppress

from octavo.errors import OctavoError


class AbortedIds:
    """Ids of aborted requests, until all cores have answered a call that was made after the abort.

    An output names its request by the id alone: another request with the id waits, or it would get the tokens of the
    aborted one that are on their way. call: makes a control call to all cores.
    """

    def __init__(self, call: Callable[[str], Awaitable[object]]) -> None:
        self._call = call
        self._asked: set[str] = set()
        """The ids of aborts before the call in progress."""
        self._later: set[str] = set()
        """Those of later aborts."""
        self._confirming: asyncio.Task[None] | None = None

    def add(self, request_ids: Iterable[str]) -> None:
        """Note requests whose aborts were sent to the cores."""
        self._later.update(request_ids)
        if self._later and self._confirming is None:
            self._begin()

    async def wait_until_free(self, request_ids: Collection[str]) -> None:
        """Return once no output of an aborted request with one of these ids can arrive."""
        while self._confirming is not None and not (self._asked | self._later).isdisjoint(request_ids):
            await asyncio.wait({self._confirming})

    async def close(self) -> None:
        """Forget all ids. Idempotent."""
        self._later.clear()
        if self._confirming is not None:
            self._confirming.cancel()
            await asyncio.wait({self._confirming})

    def _begin(self) -> None:
        self._asked, self._later = self._later, set()
        self._confirming = asyncio.create_task(self._confirm())

    async def _confirm(self) -> None:
        try:
            with suppress(OctavoError):  # a core that cannot answer has died: nothing of it arrives any more
                await self._call("is_paused")
        finally:
            self._asked, self._confirming = set(), None
            if self._later:
                self._begin()
