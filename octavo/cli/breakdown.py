"""Where the time of a decode step goes: clocks around the seams of an engine, for as long as it is measured."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from octavo.core.seams import KernelClock, Seams
from octavo.core.step import SchedulerOutput
from octavo.engine.llm_engine import LLMEngine

OTHER = "everything else"
"""What is in no part: the loops around them, from the begin of one step to the begin of the next."""


@dataclass(slots=True)
class _Time:
    total_ns: int = 0
    kernels_ns: int = 0

    def add(self, other: _Time) -> None:
        self.total_ns += other.total_ns
        self.kernels_ns += other.kernels_ns

    def minus(self, other: _Time) -> _Time:
        return _Time(self.total_ns - other.total_ns, self.kernels_ns - other.kernels_ns)


@dataclass(slots=True)
class _Step:
    began: _Time
    plan: SchedulerOutput | None = None
    parts: dict[str, _Time] = field(default_factory=dict)


class Breakdown:
    """The steps of one measurement."""

    def __init__(self, seams: Seams) -> None:
        self._names = list(dict.fromkeys(seam.part for seam in seams.parts))
        self._clock = seams.kernel_clock
        self._steps: list[_Step] = []
        self._nested: list[_Time] = []

    def medians_us(self, num_seqs: int) -> dict[str, dict[str, float]]:
        """Microseconds by part, and of the whole `step`: `total`, `kernels`, and `host`, which is the rest.

        Medians over the steps in which `num_seqs` sequences computed a token each and nothing else happened.
        """
        rows: dict[str, list[_Time]] = {name: [] for name in [*self._names, OTHER, "step"]}
        # what the last step before another kind took is not known: nobody saw its end
        for step, following in zip(self._steps, self._steps[1:], strict=False):
            if step.plan is None or not _is_plain_decode(step.plan, num_seqs) or following.plan is None:
                continue
            whole = following.began.minus(step.began)
            rest = whole
            for name in self._names:
                part = step.parts.get(name, _Time())
                rows[name].append(part)
                rest = rest.minus(part)
            rows[OTHER].append(rest)
            rows["step"].append(whole)
        assert rows["step"], "no step was a plain decode step"
        return {name: _medians(times) for name, times in rows.items()}

    def num_steps(self, num_seqs: int) -> int:
        """Steps that `medians_us` is made of, give or take the last of each run."""
        return sum(step.plan is not None and _is_plain_decode(step.plan, num_seqs) for step in self._steps)

    def begin_step(self) -> None:
        """From here on time counts for a new step."""
        self._steps.append(_Step(self._now()))

    def timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function`, with its time without that of the seams inside it counted for `part`."""

        def call(*arguments: Any, **keywords: Any) -> Any:
            began = self._now()
            self._nested.append(_Time())
            result = function(*arguments, **keywords)
            nested, whole = self._nested.pop(), self._now().minus(began)
            if self._nested:
                self._nested[-1].add(whole)
            step = self._steps[-1]
            step.parts.setdefault(part, _Time()).add(whole.minus(nested))
            if isinstance(result, SchedulerOutput):
                step.plan = result
            return result

        return call

    def _now(self) -> _Time:
        return _Time(time.perf_counter_ns(), self._clock.kernel_nanoseconds if self._clock is not None else 0)


@contextmanager
def measured(engine: LLMEngine) -> Iterator[Breakdown]:
    """Inside, the engine's steps are taken apart. Outside nothing is left of it: clocks cost those who read them."""
    seams = engine.seams()
    breakdown = Breakdown(seams)
    step = engine.step

    def counted_step() -> Any:
        breakdown.begin_step()
        return step()

    replaced = [
        (seam.owner, seam.method, breakdown.timed(seam.part, getattr(seam.owner, seam.method))) for seam in seams.parts
    ]
    before = [(owner, method, vars(owner).get(method)) for owner, method, _ in replaced]
    for owner, method, function in [*replaced, (engine, "step", counted_step)]:
        setattr(owner, method, function)
    _switch(seams.kernel_clock, on=True)
    try:
        yield breakdown
    finally:
        _switch(seams.kernel_clock, on=False)
        for owner, method, own in [*before, (engine, "step", None)]:
            # a method of its class shows again once the instance has none
            delattr(owner, method) if own is None else setattr(owner, method, own)


def table(medians: dict[str, dict[str, float]]) -> str:
    """`Breakdown.medians_us` for people."""
    columns = ("total", "kernels", "host")
    lines = [f"  {'µs per step':22}" + "".join(f"{column:>11}" for column in columns)]
    for name, row in medians.items():
        lines.append(f"  {name:22}" + "".join(f"{row[column]:11,.1f}" for column in columns))
    return "\n".join(lines)


def _switch(clock: KernelClock | None, *, on: bool) -> None:
    if clock is not None:
        clock.is_clock_on = on


def _is_plain_decode(plan: SchedulerOutput, num_seqs: int) -> bool:
    return len(plan.rows) == plan.num_tokens == num_seqs and not plan.new_sequences and not plan.finished_ids


def _medians(times: list[_Time]) -> dict[str, float]:
    return {
        "total": statistics.median(each.total_ns for each in times) / 1e3,
        "kernels": statistics.median(each.kernels_ns for each in times) / 1e3,
        "host": statistics.median(each.total_ns - each.kernels_ns for each in times) / 1e3,
    }
