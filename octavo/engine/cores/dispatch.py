"""Which core has each open request, which requests wait for one, and which are suspects.

Requests that ran in a core when it died are suspects: they are sent again one by one, at most one to a replica, until
they have got past the place where the core died. One that runs at a second death is quarantined: it ends with an error.
Where another request had begun meanwhile, either may be the cause: then it is sent once more, and nothing else to that
replica until it has got past the place.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from octavo.core.messages import AddRequests, EngineCoreOutput, EngineCoreRequest, StepOutputs
from octavo.core.outputs import RequestError
from octavo.engine.cores.replica import Replica
from octavo.engine.cores.router import Router
from octavo.errors import EngineDeadError, EngineRestartingError

if TYPE_CHECKING:
    from octavo.engine.cores.split import Split

MAX_DEATHS: Final = 2
"""A request that ran in this many cores when they died, the last time with none that began, is not sent again."""

PATIENCE_S: Final = 5.0
"""How long new requests wait for an engine on another machine: a connection is tried at least as often."""

_log = logging.getLogger(__name__)

ToResume = Callable[[str], EngineCoreRequest | None]
"""Returns an open request with what was processed of it; None when it is not open."""


@dataclass(slots=True, eq=False)
class DispatchEntry:
    """An open request, and where it is.

    replica: who has it; None while it waits. has_run: it was in a step of that replica's core.
    num_deaths: cores that died while it ran. num_outputs_left: after so many outputs it is no longer a suspect.
    has_company: another request has begun beside this suspect.
    """

    request: EngineCoreRequest
    replica: Replica | None = None
    was_sent: bool = False
    has_run: bool = False
    num_deaths: int = 0
    num_outputs_left: int = 0
    has_company: bool = False

    @property
    def request_id(self) -> str:
        return self.request.request_id


class TakenBack(NamedTuple):
    """What a core that has gone leaves: requests that go on one by one, others that are sent again, and those that are
    not run again."""

    suspects: list[DispatchEntry]
    others: list[DispatchEntry]
    quarantined: list[DispatchEntry]


class Dispatch:
    """The open requests, and the replicas that they are sent to.

    entries: the open requests by id. suspects: those of them that wait to be sent alone. to_resume: set before a core
    can die. split: sends prompts to other cores first, where there are any.
    """

    def __init__(self, replicas: Sequence[Replica], router: Router, *, depth: int = 1) -> None:
        """replicas: others may be added to them. depth: steps that a core plans ahead."""
        self.entries: dict[str, DispatchEntry] = {}
        self.suspects: deque[DispatchEntry] = deque()
        self.to_resume: ToResume
        self.split: Split | None = None
        self._replicas = replicas
        self._router = router
        self._depth = depth
        self._waiting: deque[list[DispatchEntry]] = deque()
        self._stopped: set[str] = set()
        self._aborting: list[DispatchEntry] = []

    @property
    def is_any_ready(self) -> bool:
        return any(each.is_ready for each in self._replicas)

    def add(self, requests: Sequence[EngineCoreRequest]) -> None:
        """Open requests of which a core accepts all or refuses all; they are sent, or wait for a core."""
        batch = [DispatchEntry(request) for request in requests]
        self.entries.update((each.request_id, each) for each in batch)
        self._waiting.append(batch)
        self.send_waiting()

    def num_waiting(self) -> int:
        """Forget what has ended while it waited; return the number of requests that still wait."""
        open_ones = ([each for each in batch if self._is_open(each)] for batch in self._waiting)
        self._waiting = deque(batch for batch in open_ones if batch)
        return sum(map(len, self._waiting))

    def _is_open(self, entry: DispatchEntry) -> bool:
        return self.entries.get(entry.request_id) is entry

    def send_waiting(self) -> None:
        """Send what waits to replicas that are ready: one suspect to each, and all else in its order."""
        ready = [each for each in self._replicas if each.is_ready]
        for replica in sorted(ready, key=lambda each: each.num_open):
            while self.suspects and replica.suspect is None:
                entry = self.suspects.popleft()
                if self._place([entry], replica):
                    entry.num_outputs_left = self._depth + 1
                    replica.suspect = entry.request_id
        ready = [each for each in ready if not self._is_reserved(each)]
        while self._waiting and ready:
            batch = [each for each in self._waiting.popleft() if self._is_open(each)]
            if not batch:
                continue  # ended while it waited
            replica = ready[0] if len(ready) == 1 else self._router.choose(batch[0].request, ready)
            if self.split is None or not self.split.begin(batch, replica):
                self._place(batch, replica)

    def send_to(self, batch: list[DispatchEntry], replica: Replica) -> None:
        """Send requests to a replica, or let them wait for any when it is not ready."""
        if replica.is_ready and not self._is_reserved(replica):
            self._place(batch, replica)
        else:
            self._waiting.append(batch)
            self.send_waiting()

    def _is_reserved(self, replica: Replica) -> bool:
        """Return whether a replica has a suspect beside which nothing else may begin."""
        entry = None if replica.suspect is None else self.entries.get(replica.suspect)
        return entry is not None and entry.num_deaths >= MAX_DEATHS

    def _place(self, batch: list[DispatchEntry], replica: Replica) -> bool:
        """Send requests, as they came or with what was received of them. Returns False when all have ended."""
        requests = []
        for entry in batch:
            if not self._is_open(entry):
                continue  # ended while it waited
            request = self.to_resume(entry.request_id) if entry.was_sent else with_wait(entry.request, time.monotonic())
            if request is None:
                self.end(entry.request_id)
                continue
            if self.split is not None:
                request = self.split.for_decode(request)
            entry.replica, entry.was_sent, entry.has_run, entry.has_company = replica, True, False, False
            replica.open()
            requests.append(request)
        if requests:
            replica.client.send(AddRequests(requests))
        return bool(requests)

    def end(self, request_id: str) -> Replica | None:
        """Forget a request; return the replica that has it."""
        self._stopped.discard(request_id)
        if self.split is not None:
            self.split.end(request_id)
        entry = self.entries.pop(request_id, None)
        if entry is None or entry.replica is None:
            return None
        entry.replica.close()
        if entry.replica.suspect == request_id:
            self._clear(entry)
        return entry.replica

    def _clear(self, entry: DispatchEntry) -> None:
        """Note that the core got past the place where it died with this request, which is no longer a suspect."""
        entry.num_deaths = 0
        assert entry.replica is not None, "a suspect is cleared by a replica"
        entry.replica.suspect = None
        if self.suspects or self._waiting:
            self.send_waiting()

    def note(self, step: StepOutputs) -> None:
        """Note which requests have begun in a step, and forget those that have ended."""
        for request_id in step.began:
            if (entry := self.entries.get(request_id)) is not None:
                entry.has_run = True
                suspect_id = None if entry.replica is None else entry.replica.suspect
                if suspect_id not in (None, request_id) and (suspect := self.entries.get(suspect_id)) is not None:
                    suspect.has_company = True
        for output in step.outputs:
            if output.finished:
                self.end(output.request_id)

    def note_stop(self, request_id: str) -> None:
        """Note that the front has ended a sequence of an open request whose core may not know it yet."""
        if request_id in self.entries:
            self._stopped.add(request_id)

    def note_progress(self, replica: Replica, step: StepOutputs) -> None:
        """Count the outputs of the suspect that a replica has, once a step was processed, and forget requests whose
        last sequence has ended in it, behind one that the front had ended: no further output follows of them."""
        if self._stopped:
            for output in step.outputs:
                if output.request_id in self._stopped and self.to_resume(output.request_id) is None:
                    self.end(output.request_id)
        if replica.suspect is not None and (entry := self.entries.get(replica.suspect)) is not None:
            entry.num_outputs_left -= any(output.request_id == replica.suspect for output in step.outputs)
            if entry.num_outputs_left <= 0:
                self._clear(entry)

    def take_back(self, replica: Replica) -> TakenBack:
        """Take its requests from a replica whose core has gone; all but the quarantined ones wait to be sent again."""
        taken = TakenBack([], [], [])
        for entry in [each for each in self.entries.values() if each.replica is replica]:
            replica.close()
            entry.replica = None
            entry.num_deaths += entry.has_run and not replica.is_draining
            is_quarantined = entry.num_deaths >= MAX_DEATHS and not entry.has_company
            kind = taken.quarantined if is_quarantined else taken.suspects if entry.num_deaths else taken.others
            kind.append(entry)
        replica.suspect = None
        # a beam search has no output before its end: others need not wait for it
        self.suspects += sorted(taken.suspects, key=lambda entry: entry.request.params.use_beam_search)
        # those that need a replica without others come first: it has just been started
        self.suspects = deque(sorted(self.suspects, key=lambda entry: entry.num_deaths < MAX_DEATHS))
        self.wait_first(taken.others)
        return taken

    def wait_first(self, requests: Sequence[DispatchEntry]) -> None:
        """Put requests before those that wait."""
        self._waiting.extendleft([entry] for entry in reversed(requests))

    def refuse_waiting(self, because: EngineRestartingError, *, begun: bool) -> list[EngineCoreOutput]:
        """Forget requests that wait, with `begun` also those that a core has begun; return their last outputs."""
        error = RequestError(str(because), code="engine_restarting", retry_after_s=because.retry_after_s)
        outputs = []
        for entry in [each for each in self.entries.values() if each.replica is None]:
            if begun or not (entry.was_sent or (self.split is not None and self.split.has(entry.request_id))):
                self.end(entry.request_id)
                outputs.append(EngineCoreOutput.failed(entry.request_id, error))
        return outputs

    def note_pause(self, mode: str) -> None:
        """Note which requests a pause that begins is to end."""
        if mode == "abort":  # otherwise those of the pause before end with it, if it is not complete yet
            self._aborting = list(self.entries.values())

    def take_aborting(self) -> list[str]:
        """Return, once, the requests that no core has ended: they waited for one, or were being moved to another."""
        aborting, self._aborting = self._aborting, []
        return [each.request_id for each in aborting if self._is_open(each)]

    def quarantine(self, entry: DispatchEntry, error: EngineDeadError) -> EngineCoreOutput:
        """Forget a request that is not run again; return its last output."""
        count = entry.num_deaths
        failure = RequestError(
            f"request {entry.request_id} was running when {count} engine cores died, and is not run again; the last "
            f"one: {error}",
            code="request_quarantined",
            public_message=f"the engine died {count} times while the request was running; it is not run again",
        )
        _log.error("%s", failure.message)
        self.end(entry.request_id)
        return EngineCoreOutput.failed(entry.request_id, failure)


class Patience:
    """Ends requests that wait too long, and refuses new ones."""

    def __init__(self, dispatch: Dispatch, replicas: Sequence[Replica], most_wait_s: float = math.inf) -> None:
        """replicas: those that `dispatch` sends to, of which others may be added and removed.

        most_wait_s: how long requests that have begun wait while none is ready; new ones then wait for `PATIENCE_S`,
        later not at all. inf: all wait until one is ready.
        """
        self._dispatch = dispatch
        self._replicas = replicas
        self._most_wait_s = most_wait_s
        self._limiting: asyncio.Task[None] | None = None
        self._is_over = False

    @property
    def absence(self) -> EngineRestartingError:
        """The error of requests while no core is ready; it names what is missing."""
        if self._most_wait_s == math.inf:
            return EngineRestartingError("the engine core is being started again; try again in a few seconds")
        kind, count = "decode engine" if self._dispatch.split is not None else "engine", len(self._replicas)
        found = f"none of the {count} that it uses is connected" if count else "it has none to use"
        return EngineRestartingError(f"the server has no {kind}: {found}; try again in a few seconds")

    def check(self, most_waiting: int) -> None:
        """Raise EngineRestartingError when a new request may not wait, or as many as this wait."""
        if self._dispatch.is_any_ready:
            return
        if self._is_over or not self._replicas:
            raise self.absence
        if self._dispatch.num_waiting() >= most_waiting:
            raise EngineRestartingError(f"{most_waiting} requests wait already: {self.absence}")

    def update(self, tasks: asyncio.TaskGroup, refuse: Callable[[list[EngineCoreOutput]], Awaitable[None]]) -> None:
        """Start a task that limits the waiting when the last core is lost, and end it when a core is ready.

        refuse: sends the last outputs of requests.
        """
        if self._dispatch.is_any_ready:
            self._is_over = False
            if self._limiting is not None:
                self._limiting.cancel()
                self._limiting = None
        elif self._limiting is None and self._most_wait_s < math.inf:
            self._limiting = tasks.create_task(self._limit(refuse))

    async def _limit(self, refuse: Callable[[list[EngineCoreOutput]], Awaitable[None]]) -> None:
        patience_s = min(PATIENCE_S, self._most_wait_s)
        await asyncio.sleep(patience_s)
        self._is_over = True
        await refuse(self._dispatch.refuse_waiting(self.absence, begun=False))
        await asyncio.sleep(self._most_wait_s - patience_s)
        await refuse(self._dispatch.refuse_waiting(self.absence, begun=True))


def with_wait(request: EngineCoreRequest, now: float) -> EngineCoreRequest:
    """Return a request with its waiting time for a core, which counts towards its deadline."""
    if request.first_token_deadline_s is None:
        return request
    return msgspec.structs.replace(request, waited_s=max(0.0, now - request.arrival_time))
