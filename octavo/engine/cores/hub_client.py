"""The cores behind a hub, as an API server has them: the same interface as `Replicas`, over one connection."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from functools import reduce
from operator import add

import msgspec

from octavo.core.messages import Call, CallResult, CoreFailed, CoreReady, SchedulerStats, StepOutputs
from octavo.core.process import frames
from octavo.engine.control_calls import CallingClient
from octavo.engine.cores.dispatch import ToResume
from octavo.engine.cores.hub import Attached, FromHub, ReplicaOutputs
from octavo.engine.cores.replica import ReplicaState
from octavo.engine.cores.replicas import Process
from octavo.engine.output.metric_views import Counts
from octavo.errors import EngineDeadError


class HubClient(CallingClient):
    """The cores, through the hub. counts: returns the counts of this server's metrics, which the others add to theirs.
    abort: ends the open requests of this server that have one of these names for clients, or all requests when no name
    is given, and returns how many.

    ready, roles, can_grow: as of `Replicas`.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, attached: Attached) -> None:
        super().__init__(reader, writer)
        self.ready: CoreReady = attached.ready
        self.can_grow = attached.can_grow
        self.roles: dict[int, str | None] = {each.number: each.role for each in attached.states}
        self.counts: Callable[[], Counts] = list
        self.abort: Callable[[list[str]], Awaitable[int]]
        self._states = {each.number: each for each in attached.states}
        self._retired = SchedulerStats(num_ready=0)
        self._decoder = msgspec.msgpack.Decoder(FromHub)

    @classmethod
    async def connect(cls, connection: socket.socket) -> HubClient:
        """Wait until the cores behind the hub are ready. Raises EngineDeadError, or what ended them."""
        reader, writer = await asyncio.open_connection(sock=connection, limit=1 << 20)
        body = await frames.read_async(reader)
        if body is None:
            raise EngineDeadError("the server's first process has ended")
        message = msgspec.msgpack.decode(body, type=Attached | CoreFailed)
        if isinstance(message, CoreFailed):
            raise message.error()
        return cls(reader, writer, message)

    @property
    def states(self) -> list[ReplicaState]:
        """Return the state of each replica, in the order of their numbers."""
        return [self._states[number] for number in sorted(self._states)]

    @property
    def stats(self) -> SchedulerStats:
        """Return the sum of the states of all replicas, as `Replicas.stats`."""
        return reduce(add, (each.own_stats for each in self.states), self._retired)

    async def run(self, process: Process, to_resume: ToResume) -> None:
        """Process the outputs of all cores. Raises EngineDeadError when none is left."""
        while self._error is None:
            body = await frames.read_async(self._reader)
            if body is None:
                self._die("the server's first process has ended")
                break
            match self._decoder.decode(body):
                case ReplicaOutputs(state, outputs, is_removed):
                    self.roles.setdefault(state.number, state.role)
                    if not is_removed:
                        self._states[state.number] = state
                    elif (gone := self._states.pop(state.number, None)) is not None:
                        self._retired += gone.own_stats.totals()
                    await process(state.number, StepOutputs(outputs=outputs, stats=state.stats))
                case CallResult() as result:
                    self._calls.resolve(result, _error_of)
                case Call(call_id, method, arguments):
                    value = self.counts() if method == "counts" else await self.abort([*map(str, arguments)])
                    self._write(CallResult(call_id=call_id, value=msgspec.Raw(frames.encode(value))))
                case CoreFailed() as failure:
                    self._die(failure.message)
        assert self._error is not None
        raise self._error

    async def check_health(self) -> None:
        """Return when one core works. Raises as `Replicas.check_health`."""
        await self.call("check_health")

    async def drain(self, number: int, *, stops: bool = False) -> int:
        """Move the requests of a replica to others, as `Replicas.drain`."""
        return int(await self.call("drain", number, stops))

    async def counts_of_others(self) -> list[Counts]:
        """Return the counts of the other servers' metrics."""
        return msgspec.convert(await self.call("counts"), list[Counts])

    async def abort_at_others(self, names: list[str]) -> int:
        """End open requests of the other servers, as `abort` does here; return how many."""
        return sum(msgspec.convert(await self.call("abort", *names), list[int]))

    async def shutdown(self) -> None:
        """Close the connection; the hub ends the requests. Idempotent."""
        self.begin_shutdown()
        self._writer.close()


def _error_of(failure: str) -> Exception:
    """Return the error that the hub has met; it sends a `CoreFailed` as text."""
    return msgspec.json.decode(failure, type=CoreFailed).error()
