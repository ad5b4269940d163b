"""The engine cores behind one front: which of them gets a request, and what becomes of it when its core dies.

A request goes on from what the front has received of it (`OutputProcessor.to_resume`), on another replica or on the
core that replaces the dead one. Requests that ran in a core when it died are suspects: they are sent again one by one,
at most one to a replica, until they have got past the place where the core died. One that runs at a second death is
quarantined: it ends with an error.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import add
from typing import Any, Final

from octavo.config.replicas import replica_config
from octavo.config.schema import EngineConfig
from octavo.core.messages import (
    AbortRequests,
    AddRequests,
    CoreReady,
    EngineCoreOutput,
    EngineCoreRequest,
    SchedulerStats,
    StepOutputs,
    StopSequence,
)
from octavo.core.outputs import RequestError
from octavo.engine.control_calls import Pins, merged
from octavo.engine.core_client import ProcessClient
from octavo.engine.core_spawn import SpawnedCore
from octavo.engine.replica import Replica
from octavo.engine.router import RoundRobin, Router, make_router
from octavo.errors import EngineDeadError, EngineRestartingError, InvalidRequest

MAX_WAITING: Final = 1024
"""Requests that wait in the front while no core is ready, where max_queued_requests sets no other limit."""

MAX_DEATHS: Final = 2
"""A request that ran in this many cores when they died is not sent again."""

_log = logging.getLogger(__name__)

Process = Callable[[int, StepOutputs], Awaitable[None]]
"""Processes the outputs of a step of the replica with this number."""

ToResume = Callable[[str], EngineCoreRequest | None]
"""Returns an open request with what was processed of it; None when it is not open."""


@dataclass(slots=True, eq=False)
class _Sent:
    """An open request. replica: who has it; None while it waits. has_run: it was in a step of that replica's core.

    num_deaths: cores that died while it ran. num_outputs_left: after so many outputs it is no longer a suspect.
    """

    request: EngineCoreRequest
    replica: Replica | None = None
    was_sent: bool = False
    has_run: bool = False
    num_deaths: int = 0
    num_outputs_left: int = 0


class Replicas:
    """The client of all cores: messages go to the one that has the request, control calls to all.

    ready: what the core with the smallest cache has measured.
    """

    def __init__(
        self,
        replicas: Sequence[Replica],
        router: Router | None = None,
        *,
        depth: int = 1,
        max_waiting: int = MAX_WAITING,
    ) -> None:
        """depth: steps that a core plans ahead."""
        self._replicas = list(replicas)
        self.ready: CoreReady = min((each.client.ready for each in replicas), key=lambda ready: ready.cache.num_tokens)
        self._router = router or RoundRobin()
        self._depth = depth
        self._max_waiting = max_waiting
        self._process: Process
        self._to_resume: ToResume
        self._sent: dict[str, _Sent] = {}
        self._waiting: deque[list[_Sent]] = deque()
        self._suspects: deque[_Sent] = deque()
        self._pins = Pins()
        self._error: EngineDeadError | None = None

    @classmethod
    async def start(cls, config: EngineConfig, core: SpawnedCore | None = None) -> Replicas:
        """Start all cores, the first in the process `core`. Raises what one of them raised, when the others ended."""
        count, most = config.replicas.data_parallel_size, config.replicas.max_core_restarts

        async def start_again(number: int, before: CoreReady, num_starts: int) -> ProcessClient:
            return await ProcessClient.start(replica_config(config, number, before=before, num_starts=num_starts))

        starting = [
            asyncio.ensure_future(ProcessClient.start(replica_config(config, number), core if number == 0 else None))
            for number in range(count)
        ]
        try:
            clients = await asyncio.gather(*starting)
        except BaseException:
            for each in starting:
                each.cancel()
            started = await asyncio.gather(*starting, return_exceptions=True)
            await asyncio.gather(*(each.shutdown() for each in started if isinstance(each, ProcessClient)))
            raise
        return cls(
            [Replica(number, client, start_again, most) for number, client in enumerate(clients)],
            make_router(config.replicas.router, config.cache.block_size),
            depth=config.scheduler.max_steps_in_flight,
            max_waiting=config.scheduler.max_queued_requests or MAX_WAITING,
        )

    # ---- state ----

    @property
    def is_running(self) -> bool:
        """Return False once the last core is given up or `shutdown` was called."""
        return self._error is None

    @property
    def stats(self) -> SchedulerStats:
        """Return the sum of the states of all replicas."""
        return reduce(add, (each.stats for each in self._replicas))

    @property
    def stats_of_each(self) -> list[SchedulerStats]:
        return [each.stats for each in self._replicas]

    async def check_health(self) -> None:
        """Return when one core works. Raises EngineDeadError, EngineRestartingError or EngineUnresponsiveError."""
        checks = [each.check_health() for each in self._ready_ones()]
        found = await asyncio.gather(*checks, return_exceptions=True)
        if found and isinstance(found[0], BaseException) and None not in found:
            raise found[0]

    def _ready_ones(self) -> list[Replica]:
        """Return the replicas that can be used. Raises EngineDeadError or EngineRestartingError when there are none."""
        ready = [each for each in self._replicas if each.is_ready]
        if not ready:
            raise self._error or EngineRestartingError(
                "the engine core is being started again; try again in a few seconds"
            )
        return ready

    # ---- messages to the cores ----

    def send(self, message: AddRequests | AbortRequests | StopSequence) -> None:
        """Send requests to a replica, or a message about one to the replica that has it.

        While no core is ready requests wait, in their order. Raises EngineDeadError, and EngineRestartingError when too
        many wait.
        """
        if self._error is not None:
            raise self._error
        match message:
            case AddRequests(requests):
                self._add(requests)
            case AbortRequests(request_ids):
                for request_id in request_ids:
                    replica = self._end(request_id)
                    if replica is not None and replica.is_ready:
                        replica.client.send(AbortRequests([request_id]))
            case StopSequence(request_id):
                sent = self._sent.get(request_id)
                if sent is not None and sent.replica is not None and sent.replica.is_ready:
                    sent.replica.client.send(message)
                if self._to_resume(request_id) is None:
                    self._end(request_id)

    def _add(self, requests: list[EngineCoreRequest]) -> None:
        is_any_ready = any(each.is_ready for each in self._replicas)
        if not is_any_ready and self._num_waiting() >= self._max_waiting:
            raise EngineRestartingError(
                f"{self._max_waiting} requests wait for an engine core that is being started again; try again in "
                "a few seconds"
            )
        batch = [_Sent(request) for request in requests]
        self._sent.update((each.request.request_id, each) for each in batch)
        self._waiting.append(batch)
        if is_any_ready:
            self._dispatch()

    def _num_waiting(self) -> int:
        """Forget what has ended while it waited; return the number of requests that still wait."""
        open_ones = ([each for each in batch if self._is_open(each)] for batch in self._waiting)
        self._waiting = deque(batch for batch in open_ones if batch)
        return sum(map(len, self._waiting))

    def _is_open(self, sent: _Sent) -> bool:
        return self._sent.get(sent.request.request_id) is sent

    def _dispatch(self) -> None:
        """Send what waits to replicas that are ready: one suspect to each, and all else in its order."""
        ready = [each for each in self._replicas if each.is_ready]
        for replica in ready:
            while self._suspects and replica.suspect is None:
                sent = self._suspects.popleft()
                if self._place([sent], replica):
                    sent.num_outputs_left = self._depth + 1
                    replica.suspect = sent.request.request_id
        while self._waiting and ready:
            batch = self._waiting.popleft()
            self._place(batch, ready[0] if len(ready) == 1 else self._router.choose(batch[0].request, ready))

    def _place(self, batch: list[_Sent], replica: Replica) -> bool:
        """Send requests, as they came or with what was received of them. Returns False when all have ended."""
        requests = []
        for sent in batch:
            request_id = sent.request.request_id
            if not self._is_open(sent):
                continue  # ended while it waited
            request = self._to_resume(request_id) if sent.was_sent else sent.request
            if request is None:
                del self._sent[request_id]
                continue
            sent.replica, sent.was_sent, sent.has_run = replica, True, False
            replica.open()
            requests.append(request)
        if requests:
            replica.client.send(AddRequests(requests))
        return bool(requests)

    def _end(self, request_id: str) -> Replica | None:
        """Forget a request; return the replica that has it."""
        sent = self._sent.pop(request_id, None)
        if sent is None or sent.replica is None:
            return None
        sent.replica.close()
        if sent.replica.suspect == request_id:
            self._clear(sent)
        return sent.replica

    def _clear(self, sent: _Sent) -> None:
        """Note that the core got past the place where it died with this request, which is no longer a suspect."""
        sent.num_deaths = 0
        assert sent.replica is not None, "a suspect is cleared by a replica"
        sent.replica.suspect = None
        if self._suspects:
            self._dispatch()

    # ---- messages from the cores ----

    async def run(self, process: Process, to_resume: ToResume) -> None:
        """Process the outputs of all cores, and replace those that die. Raises EngineDeadError when none is left."""
        self._process, self._to_resume = process, to_resume
        serving = [asyncio.ensure_future(self._serve(each)) for each in self._replicas]
        can_move = len(self._replicas) > 1
        watching = [asyncio.ensure_future(each.watch()) for each in self._replicas if each.can_restart or can_move]
        try:
            await asyncio.gather(*serving)
        finally:
            for task in (*serving, *watching):
                task.cancel()
            await asyncio.gather(*serving, *watching, return_exceptions=True)
        assert self._error is not None, "the last replica was given up"
        raise self._error

    async def _serve(self, replica: Replica) -> EngineDeadError:
        """Return why the replica is not started again."""
        while True:
            try:
                while True:
                    await self._take(replica, await replica.client.receive())
            except EngineDeadError as error:
                await self._resume_requests(replica, error)
                try:
                    await replica.replace(error)
                except EngineDeadError as last:
                    return self._give_up(replica, last)
            _log.info("replica %d is ready again", replica.number)
            await self._process(replica.number, StepOutputs(outputs=[], stats=replica.stats))
            for pin in self._pins.calls():
                replica.client.send(pin)
            self._dispatch()

    async def _take(self, replica: Replica, step: StepOutputs) -> None:
        replica.note(step)
        for request_id in step.began:
            if (sent := self._sent.get(request_id)) is not None:
                sent.has_run = True
        for output in step.outputs:
            if output.finished:
                self._end(output.request_id)
        await self._process(replica.number, step)
        if replica.suspect is not None and (sent := self._sent.get(replica.suspect)) is not None:
            sent.num_outputs_left -= any(output.request_id == replica.suspect for output in step.outputs)
            if sent.num_outputs_left <= 0:
                self._clear(sent)

    async def _resume_requests(self, replica: Replica, error: EngineDeadError) -> None:
        """Take its requests from a replica whose core has gone; those that can go on are sent elsewhere, or wait."""
        suspects: list[_Sent] = []
        others: list[_Sent] = []
        quarantined: list[_Sent] = []
        for sent in [each for each in self._sent.values() if each.replica is replica]:
            replica.close()
            sent.replica = None
            sent.num_deaths += sent.has_run and not replica.is_draining
            kind = quarantined if sent.num_deaths >= MAX_DEATHS else suspects if sent.num_deaths else others
            kind.append(sent)
        replica.suspect = None
        replica.end(len(suspects) + len(others), error)
        # a beam search has no output before its end: others need not wait for it
        self._suspects += sorted(suspects, key=lambda sent: sent.request.params.use_beam_search)
        self._waiting.extendleft([sent] for sent in reversed(others))
        can_go_on = replica.can_restart or any(each.is_ready for each in self._replicas)
        if can_go_on and (suspects or others or quarantined):
            _log.warning(
                "replica %d: %d running requests go on one by one, %d others are sent again, %d end",
                replica.number,
                len(suspects),
                len(others),
                len(quarantined),
            )
        self._dispatch()
        outputs = [self._quarantined(sent, error) for sent in quarantined]
        await self._process(replica.number, StepOutputs(outputs=outputs, stats=replica.stats))

    def _quarantined(self, sent: _Sent, error: EngineDeadError) -> EngineCoreOutput:
        """Forget a request that is not run again; return its last output."""
        request_id = sent.request.request_id
        failure = RequestError(
            f"request {request_id} was running when {MAX_DEATHS} engine cores died, and is not run again; the "
            f"last one: {error}",
            code="request_quarantined",
            public_message=f"the engine died {MAX_DEATHS} times while the request was running; it is not run again",
        )
        _log.error("%s", failure.message)
        self._end(request_id)
        return EngineCoreOutput(request_id=request_id, deltas=[], finished=True, error=failure)

    def _give_up(self, replica: Replica, error: EngineDeadError) -> EngineDeadError:
        replica.has_given_up = True
        left = sum(not each.has_given_up for each in self._replicas)
        if not left:
            self._error = error
        else:
            _log.error("replica %d is not started again: %s; %d are left", replica.number, error, left)
        return error

    # ---- control calls ----

    async def call(self, method: str, *arguments: Any) -> Any:
        """Return the result of a control call to all cores that are ready, as built-in types.

        Of several it is one: sums, the smallest pin, the entries of all with the number of their replica. Raises
        RequestFailed, and EngineDeadError or EngineRestartingError when no core is ready.
        """
        ready = self._ready_ones()
        found = await asyncio.gather(*(each.call(method, *arguments) for each in ready), return_exceptions=True)
        # a core that dies meanwhile is as one that is not ready
        replies = zip((each.number for each in ready), found, strict=True)
        values = [(number, value) for number, value in replies if not isinstance(value, EngineDeadError)]
        failure = next((value for _, value in values if isinstance(value, BaseException)), None)
        if failure is not None:
            raise failure
        if not values:
            self._ready_ones()
            raise EngineRestartingError("the engine core died during the call and is being started again; try again")
        value = values[0][1] if len(self._replicas) == 1 else merged(method, values)
        self._pins.note(method, arguments, value)
        return value

    async def drain(self, number: int, *, stops: bool = False) -> int:
        """Move the requests of a replica to others, or to the core that is started in its place; return their number.

        stops: no core is started in its place. Raises InvalidRequest.
        """
        ready = [each for each in self._replicas if each.is_ready]
        replica = next((each for each in ready if each.number == number), None)
        if replica is None:
            numbers = ", ".join(str(each.number) for each in ready) or "none"
            raise InvalidRequest(f"replica is {number}, those that are ready: {numbers}", field="replica")
        if stops and len(ready) == 1:
            raise InvalidRequest(
                f"replica {number} is the only one that is ready; end the server with SIGTERM", field="stop"
            )
        num_open = replica.num_open
        replica.is_ready, replica.is_draining, replica.is_stopped = False, True, stops
        _log.info("replica %d is drained: its %d open requests move", number, num_open)
        await replica.client.shutdown()
        return num_open

    async def shutdown(self) -> None:
        """End all cores. Bounded in time, and idempotent."""
        self._error = self._error or EngineDeadError("the engine has been shut down")
        await asyncio.gather(*(each.client.shutdown() for each in self._replicas))
