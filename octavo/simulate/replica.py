"""One engine core in simulated time: the same class that serves, over a simulated executor and clock."""

from __future__ import annotations

from octavo.core.messages import CoreReady, EngineCoreOutput, EngineCoreRequest
from octavo.engine.engine_core import EngineCore
from octavo.scheduler.build import SchedulerSettings, build_scheduler
from octavo.simulate.cost_model import CostModel
from octavo.simulate.executor import Clock, Script, SimulatedExecutor
from octavo.simulate.outcome import Totals


class Replica:
    """An engine core whose requests reach it between its steps, as those of a server do.

    num_open: requests that have not ended, those that wait for the next step included.
    """

    def __init__(
        self, number: int, settings: SchedulerSettings, cost_model: CostModel, *, candidate_spread: float = 0.5
    ) -> None:
        self.number = number
        self.clock = Clock()
        self.executor = SimulatedExecutor(cost_model, settings.cache.block_size, self.clock, candidate_spread)
        self.scheduler = build_scheduler(settings)
        ready = CoreReady(
            cache=settings.limits,
            max_model_len=settings.scheduler.max_model_len,
            vocab_size=0,
            plan="",
        )
        depth = settings.scheduler.max_steps_in_flight
        self.core = EngineCore(self.executor, self.scheduler, ready, max_steps_in_flight=depth, clock=self.clock)
        self.num_open = 0
        self.is_stepping = False
        self._inbox: list[EngineCoreRequest] = []
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

    def begin_step(self, now: float) -> float | None:
        """Start a step at `now` and return when it ends; None when there is nothing to do."""
        assert not self.is_stepping, "one step at a time"
        self.clock.now = now
        for request in self._inbox:
            self.core.add_request(request)
        self._inbox.clear()
        if not self.core.has_unfinished():
            return None
        self._outputs = self.core.step().outputs
        self.is_stepping = True
        return self.clock.now

    def end_step(self) -> list[EngineCoreOutput]:
        """End the step and return the outputs of requests that have ended with it."""
        self.is_stepping = False
        finished = [output for output in self._outputs if output.finished]
        for output in finished:
            self.num_open -= 1
            self.executor.forget(self._seeds.pop(output.request_id))
        return finished

    def totals(self) -> Totals:
        """Return the counts since the begin."""
        return Totals.of(self.scheduler.stats(), self.executor.busy_s, self.executor.gaps.counts)

    @property
    def num_running(self) -> int:
        return len(self.scheduler.running)

    @property
    def num_waiting(self) -> int:
        """Return the number of requests that wait for blocks or for their first step."""
        return len(self._inbox) + len(self.scheduler.waiting)

    @property
    def num_swapped(self) -> int:
        """Return the number of requests whose blocks are on the host."""
        return len(self.scheduler.swapped)

    @property
    def kv_usage(self) -> float:
        """Return the share of the blocks that are in use."""
        manager = self.scheduler.block_manager
        return manager.num_used_blocks / manager.limits.num_blocks
