"""Figures of whole engines on a GPU, as far as a machine without one can tell."""

from __future__ import annotations

import pytest
import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu.figures import idle_share, spans_on


@pytest.mark.parametrize(
    ("spans", "share"),
    [
        ([(0.0, 4.0)], 0.0),
        ([(0.0, 1.0), (3.0, 4.0)], 0.5),
        ([(0.0, 3.0), (1.0, 2.0), (2.5, 4.0), (6.0, 8.0)], 0.25),
        ([], 1.0),
    ],
)
def test_idle_is_what_neither_of_works_beside_each_other_covers(spans: list[tuple[float, float]], share: float) -> None:
    assert idle_share(spans) == share


def test_a_profiles_events_are_those_of_their_device() -> None:
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        torch.zeros(3) + 1
    events = profiled.events() or []
    spans = spans_on(DeviceType.CPU, events)
    assert len(spans) == len(events) >= 2
    assert spans[0][0] < spans[-1][1]
    assert not spans_on(DeviceType.CUDA, events)
