"""How outputs of requests that belong together reach their reader: by its task, or where they are made."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Protocol

from octavo.core.outputs import RequestOutput
from octavo.engine.output.open_request import OpenRequest


class DirectReader(Protocol):
    """Takes outputs in the call that makes them, which saves waking a task for each token."""

    def can_take(self) -> bool:
        """Return whether `take` would not have to wait."""

    def take(self, index: int, output: RequestOutput) -> None:
        """Take an output of request `index` that is not its last. What it raises ends all of the reader's requests."""


class Reader:
    """Reads several requests. The last output of each, and all while `direct` cannot take them, wait for the task.

    open: the requests without a last output, by index.
    """

    def __init__(self, direct: DirectReader | None = None) -> None:
        self.open: dict[int, OpenRequest] = {}
        self._direct = direct
        self._changed: dict[int, None] = {}
        self._has_changed = asyncio.Event()
        self._error: Exception | None = None
        self._is_waiting = False

    def watch(self, requests: Sequence[OpenRequest]) -> None:
        """Read these requests, which have not changed yet."""
        for index, request in enumerate(requests):
            self.open[index] = request
            request.on_change = partial(self._note_change, index)

    async def wait(self) -> None:
        """Wait until something has changed that was not taken directly. Raises what `DirectReader.take` did."""
        self._is_waiting = True
        try:
            await self._has_changed.wait()
        finally:
            self._is_waiting = False
        self._has_changed.clear()
        if self._error is not None:
            raise self._error

    def changed(self) -> Iterator[tuple[int, RequestOutput | None]]:
        """Yield what is new of each request that has changed, the oldest change first, also of later changes."""
        while self._changed:
            index = next(iter(self._changed))
            del self._changed[index]
            output = self.open[index].output() if index in self.open else None
            if output is not None and output.finished:
                del self.open[index]
            yield index, output
        self._has_changed.clear()

    def _note_change(self, index: int) -> None:
        # what was not taken before goes first
        if self._direct is not None and self._is_waiting and not self._changed and self._direct.can_take():
            request = self.open[index]
            if not request.finished and (output := request.output()) is not None:
                try:
                    self._direct.take(index, output)
                    return
                except Exception as error:
                    self._error = error
        self._changed[index] = None
        self._has_changed.set()
