"""Cores that listen for fronts on a port of the loopback, served from threads."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial
from queue import SimpleQueue
from typing import Any

from octavo.core.process.processes import run_reporting
from octavo.engine.cores.core_link import CoreAddress, CoreLink, LinkHello
from octavo.engine.cores.core_process import Inbox
from tests.fakes.core import ScriptedCore

SECRET = b"0123456789abcdef"
FRONT = LinkHello(octavo="1.2.3", model="fake", config="c0ffee")


class LinkableCore(ScriptedCore):
    """Has an executor, which is never used."""

    executor: Any = None


class Served:
    """A core at an address, until it fails or `end` is called. Its model has the vocabulary of bytes."""

    def __init__(self, core: Any, hello: LinkHello = FRONT, port: int = 0) -> None:
        self.core = core
        self._inbox: Inbox = SimpleQueue()
        self.link = CoreLink(SECRET, hello)
        self._listener = socket.create_server(("127.0.0.1", port))
        self.address = CoreAddress(*self._listener.getsockname())
        self.thread = threading.Thread(target=self._serve)
        self.thread.start()

    def _serve(self) -> None:
        with self._listener:
            serve = partial(self.link.serve, self.core, self._inbox, self._listener)
            run_reporting("the core", self.link.report, serve)
            with suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)

    async def end(self) -> None:
        """End it as a signal does."""
        self.link.stop()
        await asyncio.to_thread(self.thread.join, 10)
        assert not self.thread.is_alive(), "the core does not end"


@asynccontextmanager
async def linked(make_core: Callable[[], Any] = LinkableCore, **settings: Any) -> AsyncIterator[Served]:
    """A core at an address; it has ended when the context is left."""
    served = Served(make_core(), **settings)
    try:
        yield served
    finally:
        await served.end()
