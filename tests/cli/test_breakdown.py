"""Clocks around the parts of a step: every moment counts once, and nothing is left of them afterwards."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from octavo.cli.breakdown import Breakdown, measured, table
from octavo.core.seams import Seam, Seams
from octavo.core.step import BlockOps, ScheduledSequence, SchedulerOutput
from octavo.engine.llm_engine import LLMEngine
from tests.fakes.core import ScriptedCore


class FakeClock:
    """Time passes when someone says so; half of it in kernels."""

    is_clock_on = False

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_us = 0
        monkeypatch.setattr("time.perf_counter_ns", lambda: self.now_us * 1000)

    @property
    def kernel_nanoseconds(self) -> int:
        return self.now_us * 500


def plan(num_seqs: int, num_tokens: int = 1) -> SchedulerOutput:
    rows = [
        ScheduledSequence(seq_id=index, epoch=0, start=4, num_tokens=num_tokens, num_samples=1)
        for index in range(num_seqs)
    ]
    return SchedulerOutput(step_id=1, new_sequences=[], rows=rows, finished_ids=[], block_ops=BlockOps())


def test_time_inside_an_inner_part_is_not_the_outer_ones_and_other_steps_do_not_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = FakeClock(monkeypatch)
    breakdown = Breakdown(Seams([Seam("outer", None, ""), Seam("inner", None, "")], clock))

    def inner() -> None:
        clock.now_us += 4

    inner_timed = breakdown.timed("inner", inner)

    def outer(step: SchedulerOutput) -> SchedulerOutput:
        clock.now_us += 10
        inner_timed()
        return step

    outer_timed = breakdown.timed("outer", outer)
    for step in (plan(2, num_tokens=7), plan(2), plan(2), plan(1), plan(2)):
        breakdown.begin_step()
        outer_timed(step)
        clock.now_us += 6
    assert breakdown.num_steps(2) == 3
    medians = breakdown.medians_us(2)
    assert {name: row["total"] for name, row in medians.items()} == {
        "outer": 10,
        "inner": 4,
        "everything else": 6,
        "step": 20,
    }
    assert medians["step"] == {"total": 20, "kernels": 10, "host": 10}
    assert "everything else" in table(medians)


class Part:
    def work(self) -> None:
        """Nothing."""


class CoreWithSeams(ScriptedCore):
    part = Part()

    def seams(self) -> Seams:
        return Seams([Seam("work", self.part, "work")], None)


def test_nothing_is_left_of_the_clocks(tmp_path: Path, make_engine: Callable[[ScriptedCore], LLMEngine]) -> None:
    core = CoreWithSeams()
    engine = make_engine(core)
    with measured(engine):
        assert "work" in vars(core.part)
        assert "step" in vars(engine)
    assert "work" not in vars(core.part)
    assert "step" not in vars(engine)
