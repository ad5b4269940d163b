"""Each moment of a step counts for one part."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from octavo.core.step_times import PartTime
from octavo.worker.step_watch import StepWatch, TimedModel


class FakeTime:
    """Time that passes when a test adds to it; half of it in kernels."""

    is_clock_on = False
    now_ns = 0

    @property
    def kernel_nanoseconds(self) -> int:
        return self.now_ns // 2


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeTime:
    fake = FakeTime()
    monkeypatch.setattr("octavo.worker.step_watch.time", SimpleNamespace(perf_counter_ns=lambda: fake.now_ns))
    return fake


class SlowModel:
    def __init__(self, clock: FakeTime) -> None:
        self._clock = clock

    def __call__(self, batch: Any) -> Any:
        self._clock.now_ns += 10
        return batch

    def compute_logits(self, hidden: Any) -> Any:
        self._clock.now_ns += 4
        return hidden


def test_a_step_is_taken_apart_and_the_next_one_begins_anew(clock: FakeTime) -> None:
    watch = StepWatch(clock)
    assert clock.is_clock_on
    model = TimedModel(SlowModel(clock), watch)
    for _ in range(2):
        watch.begin()
        clock.now_ns += 2
        model(None)  # type: ignore[arg-type]
        for _ in range(3):
            clock.now_ns += 6
            model.compute_logits(None)  # type: ignore[arg-type]
        clock.now_ns += 8
        assert watch.end() == {
            "batch building": PartTime(2, 1),
            "model forward": PartTime(10, 5),
            "head": PartTime(12, 6),
            "sampling": PartTime(26, 13),
        }
        clock.now_ns += 100
    watch.close()
    assert not clock.is_clock_on


def test_without_compiled_kernels_all_time_is_of_the_host(clock: FakeTime) -> None:
    watch = StepWatch(None)
    watch.begin()
    clock.now_ns += 2
    assert watch.end() == {"batch building": PartTime(2, 0)}
