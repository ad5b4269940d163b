"""One engine core in simulated time: the same class that serves, over a simulated executor and clock."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from octavo.core.messages import AbortRequests, AddRequests, CoreReady, EngineCoreOutput, EngineCoreRequest, ToCore
from octavo.engine.engine_core import EngineCore
from octavo.scheduler.build import SchedulerSettings, build_scheduler
from octavo.simulate.cost_model import CostModel
from octavo.simulate.executor import Clock, Script, SimulatedExecutor
from octavo.simulate.link import Link, LinkedConnector
from octavo.simulate.outcome import Sample, Totals
from octavo.simulate.speculation import Guessing


class SimulatedReplica:
    """An engine core that receives requests between its steps, as in a server.

    num_open: number of requests that have not ended, including those that wait for the next step. link: sends the
    blocks of prompts to other replicas; None if it sends none. wake: called when there is work, with its time if that
    is later than now. script_of: returns the script of a request that is sent.

    Besides it has the members that the front's `Split` uses of a replica and of its core's client.
    """

    is_ready = True
    is_draining = False
    suspect = None

    def __init__(
        self,
        number: int,
        settings: SchedulerSettings,
        cost_model: CostModel,
        *,
        candidate_spread: float = 0.5,
        link: Link | None = None,
        sources: Mapping[str, Link] | None = None,
        guessing: Guessing | None = None,
    ) -> None:
        """sources: the links by which blocks arrive, by the names that `EngineCoreRequest.prefill` has for them."""
        self.number = number
        self.link = link
        self.role = "decode" if link is None else "prefill"
        self.wake: Callable[[float | None], None] = lambda at: None
        self.script_of: Callable[[str], Script]
        self.clock = Clock()
        self.executor = SimulatedExecutor(cost_model, settings.cache.block_size, self.clock, candidate_spread)
        connector = None if sources is None else LinkedConnector(sources, self.clock, lambda at: self.wake(at))
        proposer = None if guessing is None else guessing.proposer(self.executor)
        self.scheduler = build_scheduler(settings, proposer, connect=lambda *_: connector)
        self.ready = CoreReady(
            cache=settings.limits,
            max_model_len=settings.scheduler.max_model_len,
            vocab_size=0,
            plan="",
            transfer=str(number),
        )
        depth = settings.scheduler.max_steps_in_flight
        self.core = EngineCore(self.executor, self.scheduler, self.ready, max_steps_in_flight=depth, clock=self.clock)
        self._began: list[str] = []
        if link is not None:
            self.executor.link, manager = link, self.scheduler.block_manager
            manager.listeners.append(link)
            link.release = manager.pins.end_keep
            self.core.announce = lambda step: self._began.extend(step.began)
        self.num_open = 0
        self.is_stepping = False
        self._inbox: list[EngineCoreRequest] = []
        self._aborted: list[str] = []
        self._seeds: dict[str, int] = {}
        self._outputs: list[EngineCoreOutput] = []

    def submit(self, request: EngineCoreRequest, script: Script) -> None:
        """Add a request, which runs from the next step on."""
        seed = request.params.seed
        assert seed is not None, "requests of a trace have seeds"
        self.num_open += 1
        self._seeds[request.request_id] = seed
        self.executor.expect(seed, script)
        self._inbox.append(request)

    @property
    def client(self) -> SimulatedReplica:
        return self

    def send(self, message: ToCore) -> None:
        """Add requests, or abort some, with the next step."""
        match message:
            case AddRequests(requests):
                for request in requests:
                    self.submit(request, self.script_of(request.request_id))
            case AbortRequests(request_ids):
                self._aborted += request_ids
        if not self.is_stepping:
            self.wake(None)

    def open(self) -> None:
        """Do nothing: `submit` counts the request."""

    def close(self) -> None:
        """Do nothing: `end_step` counts the request's end."""

    def count(self, **counts: int) -> None:
        """Do nothing: nothing reads these counts."""

    def begin_step(self, now: float) -> float | None:
        """Start a step at `now` and return when it ends; None when there is nothing to do before something arrives."""
        assert not self.is_stepping, "one step at a time"
        self.clock.now = now
        for request in self._inbox:
            self.core.add_request(request)
        self._inbox.clear()
        self.core.abort_requests(self._aborted)
        for request_id in self._aborted:
            self._close(request_id)
        self._aborted.clear()
        if not self.core.has_unfinished():
            return None
        self._outputs = self.core.step().outputs
        self.is_stepping = not self.core.is_waiting
        return self.clock.now if self.is_stepping else None

    def take_began(self) -> list[str]:
        """Return the requests whose prompts the last step began to compute, if the core announces them."""
        began, self._began = self._began, []
        if self.link is not None:
            self.link.begin(began)
        return began

    def end_step(self) -> list[EngineCoreOutput]:
        """End the step and return its outputs."""
        self.is_stepping = False
        for output in self._outputs:
            if output.finished:
                self._close(output.request_id)
        return self._outputs

    def _close(self, request_id: str) -> None:
        seed = self._seeds.pop(request_id, None)
        if seed is None:
            return  # it had ended when it was aborted
        self.num_open -= 1
        self.executor.forget(seed)
        if self.link is not None:
            self.link.end(request_id, self.clock.now)

    def totals(self) -> Totals:
        """Return the counts since the begin."""
        return Totals.of(self.scheduler.stats(), self.executor.busy_s, self.executor.gaps.counts)

    def sample(self, now: float) -> Sample:
        """Return the state at `now`. Waiting requests are those without a first step, those in the queue, and those
        whose blocks are being fetched."""
        scheduler, manager = self.scheduler, self.scheduler.block_manager
        num_running, num_swapped = len(scheduler.running), len(scheduler.swapped)
        num_waiting = len(self._inbox) + len(scheduler.groups) - num_running - num_swapped
        usage = manager.num_used_blocks / manager.limits.num_blocks
        return Sample(now, num_running, num_waiting, num_swapped, usage, usage)
