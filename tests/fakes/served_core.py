"""A core behind a real socket, served from a thread, as `octavo.engine.cores.core_process` serves it from a process."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from octavo.core.messages import CoreFailed
from octavo.core.process.processes import report_failure
from octavo.engine.cores.core_client import ProcessClient
from octavo.engine.cores.core_process import Inbox, serve_core


@asynccontextmanager
async def served_core(core: Any, inbox: Inbox | None = None) -> AsyncIterator[ProcessClient]:
    """A client of the core; both have ended when the context is left."""
    ours, theirs = socket.socketpair()

    def serve() -> None:
        with theirs:
            try:
                serve_core(core, theirs, inbox=inbox)
            except RuntimeError as error:
                report_failure(theirs, CoreFailed(message=str(error)))

    thread = threading.Thread(target=serve)
    thread.start()
    client = await ProcessClient.connect(ours)
    try:
        yield client
    finally:
        await client.shutdown()
        await asyncio.to_thread(thread.join, 100)
        assert not thread.is_alive(), "the core does not end"
