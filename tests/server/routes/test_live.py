"""`GET /live`: what a watcher gets of a real scheduler and cache, who may watch, and what it costs when nobody does."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from octavo.core.live import CACHED, BlockMap, LiveRequest, LiveState
from octavo.core.messages import Decision, SchedulerStats
from octavo.server.routes.live import Watch, changed_runs
from tests.server.raw import EventReader, ask
from tests.server.test_isolation import entries
from tests.server.test_isolation import start as start

KEYS = entries("a", "o, rights: [observe]")


@pytest.fixture
def watch(read_events: Any) -> Callable[..., EventReader]:
    return lambda server, key="": read_events(server, "/live", key)


def change(watcher: EventReader) -> dict[str, Any]:
    """The change of core 0 in the next event."""
    return dict(watcher.next()["cores"]["0"])


def test_a_watcher_gets_the_state_and_then_what_changes(start: Any, watch: Any) -> None:
    server = start("")
    server.complete("", range(1, 10), max_tokens=3)
    watcher = watch(server)
    assert watcher.response.getheader("content-type").startswith("text/event-stream")
    first = change(watcher)
    assert first["stats"]["num_blocks"] == 512
    assert [(each["tier"], each["num_blocks"]) for each in first["maps"]] == [("device", 512)]
    assert all(cell == CACHED for *_, cell in first["maps"][0]["runs"])
    [ended] = first["ended"]
    assert [event for _, event in ended["events"]][-1] == "finished"
    assert ended["num_generated_tokens"] == 3
    server.complete("", range(20, 29), max_tokens=3)
    found: dict[str, list[Any]] = {"decisions": [], "ended": []}
    stats: dict[str, int] = {}
    while not found["ended"]:
        news = change(watcher)
        stats |= news["stats"]
        for name in found:
            found[name] += news[name]
        assert "num_blocks" not in news["stats"]  # it has not changed
    assert {each["request_id"] for each in found["ended"]} & {ended["request_id"]} == set()
    assert [each["kind"] for each in found["decisions"]] == ["admitted"]
    assert stats["num_generated_tokens"] == 6


def test_the_stream_shows_all_requests_and_needs_the_right_to_see_them(start: Any, watch: Any) -> None:
    server = start(KEYS)
    assert server.ask("", "/live").status == 401
    refused = server.ask("a", "/live")
    assert (refused.status, refused.error["code"]) == (403, "missing_right")
    assert "observe" in refused.error["message"]
    server.complete("a", range(1, 10))
    assert change(watch(server, "o"))["ended"][0]["tenant"] == "a"


def test_the_core_makes_no_report_when_nobody_watches(start: Any, watch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from octavo.engine.engine_core import EngineCore

    calls: list[float] = []
    report = EngineCore.live
    monkeypatch.setattr(EngineCore, "live", lambda core, within_s: calls.append(within_s) or report(core, within_s))
    server = start("")
    server.complete("", range(1, 10), max_tokens=9)
    assert calls == []
    watcher = watch(server)
    watcher.next()
    assert len(calls) == 1
    watcher.close()
    assert ask(server.url, "/live", method="HEAD").status == 200


REQUEST = LiveRequest("r", "running", None, 5, 0, 5, 1, 1, 2, 0, [(0.0, "queued")])


def state(**fields: Any) -> LiveState:
    plain = LiveState(1.0, 0.001, 0.01, SchedulerStats(num_blocks=4), {}, [], [], [], [])
    return msgspec.structs.replace(plain, **fields)


def cells(*values: int) -> bytes:
    return array("I", values).tobytes()


def test_what_has_not_changed_is_not_sent() -> None:
    watch, full = Watch(), state(requests={1: REQUEST}, maps=[BlockMap("device", 0, cells(8, 0, 0, 1))])
    first = watch.changes([full], {0: "decode"})
    assert first is not None
    core = first.cores["0"]
    assert core is not None
    assert core.role == "decode"
    assert core.requests == {"1": msgspec.structs.asdict(REQUEST)}
    assert core.maps[0].runs == [[0, 1, 8], [3, 1, 1]]
    assert watch.changes([msgspec.structs.replace(full, time=2.0)], {}) is None
    grown = msgspec.structs.replace(full, requests={1: msgspec.structs.replace(REQUEST, generated=2)})
    changed = watch.changes([grown], {})
    assert changed is not None
    assert changed.cores["0"] is not None
    assert (changed.cores["0"].requests, changed.cores["0"].maps) == ({"1": {"generated": 2}}, [])
    ended = watch.changes([state()], {})
    assert ended is not None
    assert ended.cores["0"] is not None
    assert ended.cores["0"].requests == {"1": None}
    assert [(each.tier, each.num_blocks) for each in ended.cores["0"].maps] == [("device", 0)]
    gone = watch.changes([], {})
    assert gone is not None
    assert gone.cores == {"0": None}


def test_an_entry_is_sent_once_and_again_only_when_it_goes_on() -> None:
    watch = Watch()
    decision = Decision(step=1, last_step=1, time=0.5, kind="blocked", request_id="r", because="no blocks")
    for last_step, expected in ((1, 1), (1, 0), (2, 1)):
        entry = msgspec.structs.replace(decision, last_step=last_step)
        change = watch.changes([state(decisions=[entry])], {})
        sent = [] if change is None or change.cores["0"] is None else change.cores["0"].decisions
        assert len(sent) == expected


def test_runs_of_blocks_cover_exactly_what_has_changed() -> None:
    before, now = list(range(1000)), list(range(1000))
    now[3:9] = [7] * 6
    now[255:258] = [9] * 3
    now[999] = 0
    runs = changed_runs(cells(*before), cells(*now))
    for first, count, cell in runs:
        before[first : first + count] = [cell] * count
    assert before == now
    assert sum(count for _, count, _ in runs) == 5 + 3 + 1  # block 7 was 7 already
    assert changed_runs(cells(1, 2), cells(0, 0, 5)) == [[2, 1, 5]]
