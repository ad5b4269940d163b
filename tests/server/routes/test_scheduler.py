"""`/scheduler/decisions` and `/scheduler/timelines`."""

from __future__ import annotations

import time

import pytest

from tests.server.conftest import Served
from tests.server.raw import ask


def test_the_last_decisions_have_the_reasons_of_the_scheduler(server: Served) -> None:
    (decision,) = ask(server.url, "/scheduler/decisions").json["decisions"]
    assert (decision["kind"], decision["because"]) == ("blocked", "no blocks")
    assert (decision["step"], decision["last_step"]) == (1, 4)
    assert decision["wall_time"] - decision["time"] == pytest.approx(time.time() - time.monotonic(), abs=1)


def test_timelines_of_requests_that_ended_have_both_clocks(server: Served) -> None:
    (timeline,) = ask(server.url, "/scheduler/timelines").json["timelines"]
    assert [event["event"] for event in timeline["events"]] == ["queued", "finished"]
    assert (timeline["prompt_tokens"], timeline["cached_tokens"], timeline["completion_tokens"]) == (5, 4, 3)
    for event, at in zip(timeline["events"], (0.5, 0.75), strict=True):
        assert event["time"] == at
        assert event["wall_time"] - at == pytest.approx(time.time() - time.monotonic(), abs=1)


@pytest.mark.parametrize("what", ["decisions", "timelines"])
def test_they_can_be_asked_for_by_request(server: Served, what: str) -> None:
    for asked, number in (("cmpl-x", 1), (f"cmpl-x-0-{'ab' * 6}", 1), ("cmpl-", 0), ("cmpl-x-0", 0), ("y", 0)):
        assert len(ask(server.url, f"/scheduler/{what}?request_id={asked}").json[what]) == number, asked
