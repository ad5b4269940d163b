"""What is kept of requests that have ended."""

from __future__ import annotations

from octavo.core.messages import RequestTimeline
from octavo.engine.engine_core import EngineCore
from octavo.scheduler.registry import NUM_TIMELINES
from tests.fakes.engine import make_core, make_request, run


def timelines(core: EngineCore) -> dict[str, RequestTimeline]:
    return {timeline.request_id: timeline for timeline in core.scheduler.timelines}


def words(core: EngineCore, request_id: str) -> list[str]:
    return [event for _, event in timelines(core)[request_id].events]


def test_a_timeline_ends_however_a_request_ends() -> None:
    core = make_core(fail_token=45)
    for request_id in ("length", "stop", "abort", "never ran"):
        core.add_request(make_request(request_id, range(4), max_tokens=4))
    core.add_request(make_request("fails", [45], max_tokens=4))
    core.abort_requests(["never ran"])
    core.step()
    core.stop_sequence("stop", 0)
    core.abort_requests(["abort"])
    run(core)
    assert words(core, "length") == words(core, "stop") == ["queued", "scheduled", "first token", "finished"]
    assert words(core, "abort") == ["queued", "scheduled", "first token", "aborted"]
    assert words(core, "never ran") == ["queued", "aborted"]
    assert words(core, "fails")[-1] == "failed"
    assert timelines(core)["length"].num_generated_tokens == 4
    for timeline in core.scheduler.timelines:
        times = [time for time, _ in timeline.events]
        assert times == sorted(times)


def test_a_timeline_has_the_tenant_of_its_request() -> None:
    core, request = make_core(), make_request("a", range(4))
    request.tenant = "alice"
    run(core, [request, make_request("b", range(4))])
    assert {name: timeline.tenant for name, timeline in timelines(core).items()} == {"a": "alice", "b": None}


def test_an_end_from_outside_has_its_own_time() -> None:
    core = make_core()
    core.add_request(make_request("a", range(4)))
    for _ in range(3):
        core.step()
    core.abort_requests(["a"])
    assert timelines(core)["a"].events[-1] == (6.0, "aborted")  # the clock counts its readings, two a step


def test_only_the_last_timelines_are_kept() -> None:
    core = make_core()
    for number in range(NUM_TIMELINES + 3):
        core.add_request(make_request(str(number), [1]))
        core.abort_requests([str(number)])
    assert [each.request_id for each in core.scheduler.timelines][:2] == ["3", "4"]
    assert len(core.scheduler.timelines) == NUM_TIMELINES
