"""The engine cores behind one front: which of them gets a request, and what becomes of it when its core dies.

A request goes on from what the front has received of it, on another replica or the core that replaces the dead one.
"""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
import tempfile
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from functools import partial, reduce
from operator import add
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from octavo.config.replicas import replica_config
from octavo.config.schema import EngineConfig
from octavo.core.messages import (
    AbortRequests,
    AddRequests,
    CoreReady,
    EngineCoreOutput,
    SchedulerStats,
    StepOutputs,
    StopSequence,
)
from octavo.engine.control_calls import LastingCalls, Replies, failure_of, merged
from octavo.engine.cores.core_client import ProcessClient
from octavo.engine.cores.core_spawn import SpawnedCore
from octavo.engine.cores.dispatch import Dispatch, Patience, ToResume
from octavo.engine.cores.replica import Replica, ReplicaState
from octavo.engine.cores.router import ROUTERS, RoundRobin, Router
from octavo.errors import EngineDeadError, EngineRestartingError, InvalidRequest

if TYPE_CHECKING:
    from octavo.engine.cores.split import Split
    from octavo.kv_transfer.host_folder import HostFolder

MAX_WAITING: Final = 1024
"""Requests that wait in the front while no core is ready, where max_queued_requests sets no other limit."""

_log = logging.getLogger(__name__)

MakeSplit = Callable[[Sequence[Replica], Dispatch], "Split"]
"""Makes the `Split` of requests over prefill cores (first argument) and the cores of the `Dispatch` (second)."""

StartReplicas = Callable[[EngineConfig], Coroutine[Any, Any, "Replicas"]]
"""Starts the cores that a configuration describes, or finds them."""

Tend = Callable[["Replicas"], Coroutine[Any, Any, None]]
"""Adds replicas to those that are served, and removes some."""

Process = Callable[[int, StepOutputs], Awaitable[None]]
"""Processes the outputs of a step of the replica with this number."""


class Replicas:
    """The client of all cores: messages go to the one that has the request, control calls to all.

    ready: what the core with the smallest cache has measured. roles: of the replicas, by number.
    """

    def __init__(
        self,
        replicas: Sequence[Replica],
        router: Router | None = None,
        *,
        depth: int = 1,
        max_waiting: int = MAX_WAITING,
        make_split: MakeSplit | None = None,
        tend: Tend | None = None,
        most_wait_s: float = math.inf,
    ) -> None:
        """depth: steps that a core plans ahead. make_split: for replicas of which some only compute prompts.

        tend: runs beside the replicas, and adds and removes some; without it their number is fixed.
        most_wait_s: how long requests wait while no core is ready (`Patience`).
        """
        self._replicas: list[Replica] = []
        self._whole: list[Replica] = []
        self._prefills: list[Replica] = []
        self._dispatch = Dispatch(self._whole, router or RoundRobin(), depth=depth)
        self._patience = Patience(self._dispatch, self._whole, most_wait_s)
        self._make_split = make_split
        self._split: Split | None = None
        self._tend = tend
        self._tasks: asyncio.TaskGroup | None = None
        self._retired = SchedulerStats(num_ready=0)
        self.roles: dict[int, str | None] = {}
        for replica in replicas:
            self.add(replica)
        self.ready: CoreReady = min((each.client.ready for each in replicas), key=lambda ready: ready.cache.num_tokens)
        self._max_waiting = max_waiting
        self._process: Process
        self._lasting = LastingCalls()
        self._error: EngineDeadError | None = None
        self._directory: HostFolder | None = None

    @classmethod
    async def start(cls, config: EngineConfig, core: SpawnedCore | None = None) -> Replicas:
        """Start all cores, the first in the process `core`. Raises what one of them raised, when the others ended."""
        count, most = config.num_engines, config.replicas.max_core_restarts
        make_split, directory = None, None
        if config.transfer.is_split:
            from octavo.engine.cores import split
            from octavo.kv_transfer.host_folder import HostFolder

            directory = HostFolder(Path(tempfile.gettempdir()) / f"octavo-split-{secrets.token_hex(4)}")
            config = split.with_meeting_place(config, str(directory.path))
            make_split = partial(split.make_split, config)

        async def start_again(number: int, before: CoreReady, num_starts: int) -> ProcessClient:
            its = replica_config(started._lasting.started(number, config), number, before=before, num_starts=num_starts)
            return await ProcessClient.start(its)

        configs = [replica_config(config, number) for number in range(count)]
        clients = await ProcessClient.start_all(configs, core)
        replicas = []
        for number, (its, client) in enumerate(zip(configs, clients, strict=True)):
            replicas.append(Replica(number, client, start_again, most, its.transfer.role))
            if make_split is not None:
                cpus = ", ".join(map(str, its.replicas.cpus))
                _log.info("%s: processors %s; %s", its.replicas.name, cpus, client.ready.plan_summary)
        started = cls(
            replicas,
            ROUTERS[config.replicas.router](config.cache.block_size),
            depth=config.scheduler.max_steps_in_flight,
            max_waiting=config.scheduler.max_queued_requests or MAX_WAITING,
            make_split=make_split,
        )
        started._directory = directory
        return started

    # ---- state ----

    @property
    def is_running(self) -> bool:
        """Return False once the last core is given up or `shutdown` was called."""
        return self._error is None

    @property
    def stats(self) -> SchedulerStats:
        """Return the sum of the states of all replicas. Prompts that are handed over count where they are decoded."""
        return reduce(add, (each.own_stats for each in self.states), self._retired)

    @property
    def states(self) -> list[ReplicaState]:
        """Return the state of each replica, in the order of their numbers."""
        return [each.state for each in sorted(self._replicas, key=lambda each: each.number)]

    @property
    def can_grow(self) -> bool:
        """Return whether replicas may be added."""
        return self._tend is not None

    # ---- replicas that come and go ----

    def free_number(self, role: str | None) -> int:
        """Return the number of the next replica with a role: one that was removed and had the role, or a new one."""
        used = {each.number for each in self._replicas}
        return next((each for each, its in self.roles.items() if its == role and each not in used), len(self.roles))

    def add(self, replica: Replica) -> None:
        """Add a replica, also while others are served."""
        self.roles[replica.number] = replica.role
        self._replicas.append(replica)
        (self._prefills if replica.role == "prefill" else self._whole).append(replica)
        if self._prefills and self._split is None and self._make_split is not None:
            self._split = self._dispatch.split = self._make_split(self._prefills, self._dispatch)
        if self._tasks is not None:
            self._lasting.send_to(replica.number, replica.client.send)
            self._begin(replica, self._tasks)

    async def remove(self, replica: Replica) -> None:
        """End a replica; its requests go on elsewhere, or wait for another one."""
        replica.is_stopped = True
        if replica.is_ready:
            await self._drain(replica, stops=True)

    async def _retire(self, replica: Replica) -> None:
        """Forget a replica that was removed, but for its totals."""
        self._replicas.remove(replica)
        (self._prefills if replica.role == "prefill" else self._whole).remove(replica)
        self._retired += replica.state.own_stats
        await self._process(replica.number, StepOutputs(outputs=[], stats=SchedulerStats(num_ready=0)))

    async def check_health(self) -> None:
        """Return when one core that decodes works. Raises as `Replica.check_health`, which is asked of all, does."""
        whole, prefills = self._ready_ones(self._whole), [each for each in self._prefills if each.is_ready]
        found = await asyncio.gather(*(each.check_health() for each in (*whole, *prefills)), return_exceptions=True)
        if isinstance(found[0], BaseException) and None not in found[: len(whole)]:
            raise found[0]

    def _ready_ones(self, replicas: Sequence[Replica]) -> list[Replica]:
        """Return the replicas that can be used. Raises EngineDeadError or EngineRestartingError when there are none."""
        ready = [each for each in replicas if each.is_ready]
        if not ready:
            raise self._error or self._patience.absence
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
                self._patience.check(self._max_waiting)
                self._dispatch.add(requests)
            case AbortRequests(request_ids):
                for request_id in request_ids:
                    self._abort(request_id)
            case StopSequence(request_id):
                is_over = self._dispatch.to_resume(request_id) is None
                self._dispatch.note_stop(request_id)
                if self._split is not None and self._split.holds(message):
                    if is_over:
                        self._abort(request_id)
                    return
                entry = self._dispatch.entries.get(request_id)
                if entry is not None and entry.replica is not None and entry.replica.is_ready:
                    entry.replica.client.send(message)
                if is_over:
                    self._dispatch.end(request_id)

    def _abort(self, request_id: str) -> None:
        replica = self._dispatch.end(request_id)
        if replica is not None and replica.is_ready:
            replica.client.send(AbortRequests([request_id]))

    def _update_patience(self, replica: Replica) -> None:
        async def refuse(outputs: list[EngineCoreOutput]) -> None:
            stats = replica.stats if replica in self._replicas else SchedulerStats(num_ready=0)
            await self._process(replica.number, StepOutputs(outputs=outputs, stats=stats))

        assert self._tasks is not None, "the cores are served"
        self._patience.update(self._tasks, refuse)

    # ---- messages from the cores ----

    async def run(self, process: Process, to_resume: ToResume) -> None:
        """Process the outputs of all cores, and replace those that die. Raises EngineDeadError when none is left."""
        self._process, self._dispatch.to_resume = process, to_resume
        try:
            async with asyncio.TaskGroup() as tasks:
                self._tasks = tasks
                for replica in self._replicas:
                    self._begin(replica, tasks)
                if self._tend is not None:
                    tasks.create_task(self._tend(self))
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None

    def _begin(self, replica: Replica, tasks: asyncio.TaskGroup) -> None:
        serving = tasks.create_task(self._serve(replica))
        if replica.can_restart or len(self._replicas) > 1:
            watching = tasks.create_task(replica.watch())
            serving.add_done_callback(lambda _: watching.cancel())

    async def _serve(self, replica: Replica) -> None:
        """Return when the replica is not started again; of the last one, raise EngineDeadError with the reason."""
        while True:
            try:
                while True:
                    await self._take(replica, await replica.client.receive())
            except EngineDeadError as error:
                if replica.client.was_ended:
                    replica.is_draining = True
                    _log.info("%s: %s", replica.name, error)
                await self._resume_requests(replica, error)
                try:
                    await replica.replace(error)
                except EngineDeadError as last:
                    if self.can_grow:
                        await self._retire(replica)
                    else:
                        self._give_up(replica, last)
                    return
            self._lasting.send_to(replica.number, replica.client.send)  # before any request
            _log.info("%s is ready again", replica.name)
            self._update_patience(replica)
            await self._process(replica.number, StepOutputs(outputs=[], stats=replica.stats))
            self._dispatch.send_waiting()

    async def _take(self, replica: Replica, step: StepOutputs) -> None:
        if self._split is not None:
            self._split.take(replica, step)
        replica.note(step)
        self._dispatch.note(step)
        await self._process(replica.number, step)
        self._dispatch.note_progress(replica, step)

    async def _resume_requests(self, replica: Replica, error: EngineDeadError) -> None:
        """Take its requests from a replica whose core has gone; those that can go on are sent elsewhere, or wait."""
        taken = self._dispatch.take_back(replica)
        if self._split is not None:
            self._split.forget()
            taken.others.extend(not_begun := self._split.lose(replica))
            self._dispatch.wait_first(not_begun)
        replica.end(len(taken.suspects) + len(taken.others), error)
        if any(taken) and (replica.can_restart or self._dispatch.is_any_ready):
            _log.warning(
                "%s: %d running requests go on one by one, %d others are sent again, %d end",
                replica.name,
                *map(len, taken),
            )
        self._dispatch.send_waiting()
        self._update_patience(replica)
        outputs = [self._dispatch.quarantine(entry, error) for entry in taken.quarantined]
        await self._process(replica.number, StepOutputs(outputs=outputs, stats=replica.stats))

    def _give_up(self, replica: Replica, error: EngineDeadError) -> None:
        """Raises `error` when no replica is left that decodes."""
        replica.has_given_up = True
        if not (left := sum(not each.has_given_up for each in self._whole)):
            self._error = error
            raise error
        level = logging.INFO if replica.is_stopped else logging.ERROR
        _log.log(level, "%s is not started again: %s; replicas that are left: %d", replica.name, error, left)

    # ---- control calls ----

    async def call(self, method: str, *arguments: Any) -> Any:
        """Return the result of a control call to all ready cores, as built-in types; of several the sum, the smallest
        pin, or all entries with the number of their replica. Raises RequestFailed, and EngineDeadError or
        EngineRestartingError when no core is ready."""
        return await asyncio.shield(self._call(method, arguments))  # noted also when its caller has gone

    async def _call(self, method: str, arguments: tuple[Any, ...]) -> Any:
        if method == "pause":
            self._dispatch.note_pause(arguments[0])
        values = await self._lasting.make(self._call_each, method, arguments, len(self._replicas))
        if (failure := failure_of(values)) is not None:
            raise failure
        if not values:
            self._ready_ones(self._replicas)
            raise EngineRestartingError("the engine core died during the call and is being started again; try again")
        value = values[0][1] if len(self._replicas) == 1 else merged(method, values)
        self._lasting.note(method, arguments, value)
        if self._split is not None and method in ("reset_prefix_cache", "pause"):
            self._split.forget()
        if method in ("resume", "wake_up") or (value is True and method in ("pause", "pause_is_complete")):
            await self._abort_rest()
        return value

    async def _abort_rest(self) -> None:
        for request_id in (aborted := self._dispatch.take_aborting()):
            self._abort(request_id)
        outputs = [EngineCoreOutput(request_id=each, deltas=[], finished=True) for each in aborted]
        if outputs:
            await self._process(self._replicas[0].number, StepOutputs(outputs=outputs, stats=self._replicas[0].stats))

    async def _call_each(self, method: str, arguments: Iterable[Any]) -> Replies:
        ready = self._ready_ones(self._replicas)
        found = await asyncio.gather(*(each.call(method, *arguments) for each in ready), return_exceptions=True)
        replies = [(each.number, value) for each, value in zip(ready, found, strict=True)]
        return [each for each in replies if not isinstance(each[1], EngineDeadError)]  # it counts as not ready

    async def drain(self, number: int, *, stops: bool = False) -> int:
        """Move the requests of a replica to others, or to the core that is started in its place; return their number.

        stops: no core is started in its place. Raises InvalidRequest.
        """
        ready = [each for each in self._replicas if each.is_ready]
        replica = next((each for each in ready if each.number == number), None)
        if replica is None:
            numbers = ", ".join(str(each.number) for each in ready) or "none"
            raise InvalidRequest(f"replica is {number}, must be one that is ready: {numbers}", field="replica")
        if stops and replica in self._whole and sum(each.is_ready for each in self._whole) == 1:
            message = f"replica {number} is the only one that is ready; end the server with SIGTERM"
            raise InvalidRequest(message, field="stop")
        return await self._drain(replica, stops=stops)

    async def _drain(self, replica: Replica, *, stops: bool) -> int:
        num_open, replica.is_ready, replica.is_draining, replica.is_stopped = replica.num_open, False, True, stops
        _log.info("%s is drained: its %d open requests move", replica.name, num_open)
        await replica.client.shutdown()
        return num_open

    def begin_shutdown(self) -> None:
        """Tell all cores to end. Idempotent."""
        self._error = self._error or EngineDeadError("the engine has been shut down")
        for each in self._replicas:
            each.client.begin_shutdown()

    async def shutdown(self) -> None:
        """End all cores. Bounded in time, and idempotent."""
        self.begin_shutdown()
        await asyncio.gather(*(each.client.shutdown() for each in self._replicas))
        if self._directory is not None:
            self._directory.close()
