"""The client of an engine core in another process, behind a socket."""

from __future__ import annotations

import asyncio
import math
import socket
from collections.abc import Sequence
from typing import Final

import msgspec

from octavo.config.schema import EngineConfig
from octavo.core.messages import PING, CallResult, CoreFailed, CoreReady, FromCore, StepOutputs
from octavo.core.process import frames
from octavo.core.process.processes import SHUTDOWN_TIMEOUT_S, ProcessState, how_it_ended
from octavo.engine.control_calls import CallingClient
from octavo.engine.cores.core_health import CORE, CoreHealth
from octavo.engine.cores.core_spawn import SpawnedCore
from octavo.errors import EngineDeadError, OctavoError, RequestFailed

STOPPED_S: Final = 10.0
"""How long a core may be stopped by a signal while it starts, and up to as long again."""

HUNG_S: Final = 300.0
"""How long a core that starts may use no processor time. One with several ranks may wait for them."""


class ProcessClient(CallingClient):
    """The client of a core that is served at the other end of a socket. One event loop, one receiver.

    When the core dies, `receive` and every call raise EngineDeadError with its failure. was_ended: whether the core was
    ended on request.
    """

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        ready: CoreReady,
        core: SpawnedCore | None,
        name: str = CORE,
    ) -> None:
        super().__init__(reader, writer)
        self.ready = ready
        self.was_ended = False
        self._core = core
        self._name = name
        self._decoder = msgspec.msgpack.Decoder(FromCore)
        self._killed_because: str | None = None
        self._health = CoreHealth(lambda: self.call(PING), None if core is None else core.process.pid, name)

    @classmethod
    async def start(cls, config: EngineConfig, core: SpawnedCore | None = None) -> ProcessClient:
        """Start a core in `core`, or in a process of its own, and wait until it is ready.

        Raises what the core raised, such as CheckpointError.
        """
        core = core or SpawnedCore()
        core.is_used = True
        try:
            core.connection.sendall(frames.pack(config))
            return await cls.connect(core.connection, core, math.inf if config.device.num_ranks > 1 else HUNG_S)
        except BaseException as error:
            core.connection.close()
            has_failed = isinstance(error, OctavoError)  # then it ends by itself
            await asyncio.shield(asyncio.to_thread(core.end, SHUTDOWN_TIMEOUT_S if has_failed else 0.0))
            raise

    @classmethod
    async def connect(
        cls, connection: socket.socket, core: SpawnedCore | None = None, max_idle_s: float = math.inf, name: str = CORE
    ) -> ProcessClient:
        """Wait for CoreReady on a connection whose other end is served by `serve_core`.

        max_idle_s: how long the process of the core may use no processor time. name: what errors call the core. Raises
        what the core raised, or EngineDeadError.
        """
        reader, writer = await asyncio.open_connection(sock=connection, limit=1 << 20)
        try:
            body = await _first_message(reader, core, max_idle_s)
            if body is None:
                raise EngineDeadError(await _how_it_ended(core, name))
            message = msgspec.msgpack.decode(body, type=CoreReady | CoreFailed)
            if isinstance(message, CoreFailed):
                raise message.error()
        except BaseException:
            writer.close()
            raise
        return cls(reader, writer, message, core, name)

    @classmethod
    async def start_all(cls, configs: Sequence[EngineConfig], core: SpawnedCore | None = None) -> list[ProcessClient]:
        """Start several cores at once, the first in the process `core`. Raises what one of them raised, when the others
        have ended."""
        starting = [
            asyncio.ensure_future(cls.start(each, core if number == 0 else None)) for number, each in enumerate(configs)
        ]
        try:
            return await asyncio.gather(*starting)
        except BaseException:
            for each in starting:
                each.cancel()
            ended = await asyncio.gather(*starting, return_exceptions=True)
            await asyncio.gather(*(each.shutdown() for each in ended if isinstance(each, ProcessClient)))
            raise

    async def check_health(self) -> None:
        """Raise EngineDeadError when the core has died, EngineUnresponsiveError when it is stopped or hung."""
        if self._error is not None:
            raise self._error
        await self._health.check()

    async def receive(self) -> StepOutputs:
        """Return the next outputs, and pass results of calls to their callers meanwhile. Raises EngineDeadError."""
        while self._error is None:
            body = await frames.read_async(self._reader)
            if body is None:
                self._die(self._killed_because or await _how_it_ended(self._core, self._name))
                break
            try:
                message = self._decoder.decode(body)
            except msgspec.MsgspecError as error:
                self._die(f"{self._name} has sent data that is no message: {error}")
                break
            if isinstance(message, StepOutputs):
                return message
            if isinstance(message, CallResult):
                self._calls.resolve(message, RequestFailed)
            elif isinstance(message, CoreFailed):
                self.was_ended = message.is_on_request
                self._die(message.message)
                self._writer.close()
        assert self._error is not None
        raise self._error

    def kill(self, because: str) -> None:
        """Kill the core's process, or close the connection of one that has none; it dies with this message."""
        self._killed_because = because
        if self._core is None:
            self._writer.transport.abort()
        else:
            self._core.process.kill()

    async def shutdown(self, timeout_s: float = SHUTDOWN_TIMEOUT_S) -> None:
        """End the core and wait for its process, with force when it takes longer than `timeout_s`. Idempotent."""
        self.begin_shutdown()
        if self._core is not None:
            await asyncio.to_thread(self._core.end, timeout_s)
        self._writer.close()


async def _first_message(reader: asyncio.StreamReader, core: SpawnedCore | None, max_idle_s: float) -> bytes | None:
    """Return the body of the first message, None when the core ends before it.

    Raises EngineDeadError when a signal stops the core for `STOPPED_S`, or it uses no processor time for `max_idle_s`:
    its client ends a core that cannot start.
    """
    reading = asyncio.ensure_future(frames.read_async(reader))
    was_stopped, idle_s = False, 0.0
    before: ProcessState | None = None
    try:
        while not (await asyncio.wait({reading}, timeout=STOPPED_S))[0]:
            state = None if core is None else ProcessState.of(core.process.pid)
            is_stopped = state is not None and state.is_stopped
            if is_stopped and was_stopped:
                raise EngineDeadError("the engine core was stopped by a signal or a debugger while it started")
            is_idle = state is not None and before is not None and not state.has_worked_since(before)
            idle_s = idle_s + STOPPED_S if is_idle else 0.0
            if idle_s >= max_idle_s:
                raise EngineDeadError(
                    f"the engine core neither responded nor used processor time for {idle_s:g} s while it started"
                )
            was_stopped, before = is_stopped, state
        return reading.result()
    finally:
        reading.cancel()


async def _how_it_ended(core: SpawnedCore | None, name: str) -> str:
    """Return what is known about a core whose connection has ended without a message."""
    if core is None:
        return f"{name} has closed its connection"
    return await asyncio.to_thread(how_it_ended, name, core.process)
