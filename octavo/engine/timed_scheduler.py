"""Times the calls of a scheduler, for a core that reports step times."""

from __future__ import annotations

import time

from octavo.core.messages import EngineCoreOutput, StepTimes
from octavo.core.step import ModelRunnerOutput, SchedulerOutput
from octavo.core.step_times import SCHEDULING, UPDATE, PartTime
from octavo.scheduler.scheduler import Scheduler


class TimedScheduler:
    """Plans and updates as a scheduler does, and takes the times of both."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._times = StepTimes()

    def schedule(self, now: float) -> SchedulerOutput | None:
        began = time.perf_counter_ns()
        step = self._scheduler.schedule(now)
        times = self._times
        times.began_ns = times.began_ns or began
        times.parts.setdefault(SCHEDULING, PartTime()).total_ns += time.perf_counter_ns() - began
        if step is not None:
            times.planned.append(step)
        return step

    def update(self, output: ModelRunnerOutput, now: float) -> list[EngineCoreOutput]:
        began = time.perf_counter_ns()
        outputs = self._scheduler.update(output, now)
        self._times.parts |= output.times or {}
        self._times.parts[UPDATE] = PartTime(time.perf_counter_ns() - began)
        return outputs

    def take_times(self) -> StepTimes:
        """Return the times since the last call of this method."""
        times, self._times = self._times, StepTimes()
        return times
