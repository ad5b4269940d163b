"""The report of a core: requests in each place, the last step, and what every block is."""

from __future__ import annotations

from array import array
from typing import Any

import msgspec

from octavo.core.live import CACHED, FREE, MOST_REQUESTS, OWNER_SHIFT, PINNED, SHARED, USED, LiveState
from octavo.engine.engine_core import EngineCore
from tests.fakes.engine import make_core, make_request


def report(core: EngineCore, within_s: float = 1e9) -> LiveState:
    [found] = msgspec.convert(core.call("live", within_s), list[LiveState])
    return found


def kinds(state: LiveState, tier: str = "device") -> list[tuple[int, int]]:
    """The kind and the owner of each block."""
    [cells] = [array("I", each.cells) for each in state.maps if each.tier == tier]
    return [(cell & ((1 << OWNER_SHIFT) - 1), cell >> OWNER_SHIFT) for cell in cells]


def core_with(*lengths: int, **settings: Any) -> EngineCore:
    core = make_core(num_blocks=8, block_size=4, **settings)
    for i, length in enumerate(lengths):
        core.add_request(make_request(f"r{i}", range(100 * i, 100 * i + length), max_tokens=9))
    return core


def test_a_core_that_has_done_nothing_has_free_blocks_alone() -> None:
    state = report(make_core(num_blocks=8))
    assert kinds(state) == [(FREE, 0)] * 8
    assert (state.requests, state.rows, state.decisions, state.ended) == ({}, [], [], [])


def test_every_block_of_a_request_names_it() -> None:
    core = core_with(6, 3, max_num_seqs=1)
    core.step()
    state = report(core)
    running, waiting = sorted(state.requests)
    assert [state.requests[running].state, state.requests[waiting].state] == ["running", "waiting"]
    assert kinds(state).count((USED, running)) == state.requests[running].blocks == 2
    assert (state.rows[-1].request, state.requests[running].prompt) == (running, 6)
    assert state.requests[running].events[0][1] == "queued"


def test_of_more_requests_than_are_reported_those_with_blocks_come_first() -> None:
    core = make_core(num_blocks=8, block_size=4, max_num_seqs=1, policy="priority")
    for number in range(MOST_REQUESTS + 20):
        request = make_request(f"r{number}", [number % 50], max_tokens=9)
        request.priority = -number
        core.add_request(request)
    core.step()
    listed = list(report(core).requests.values())
    assert [each.request_id for each in listed[:3]] == [f"r{MOST_REQUESTS + 19}", "r0", "r1"]
    assert [each.state for each in listed] == ["running", *["waiting"] * (MOST_REQUESTS - 1)]


def test_an_engine_that_has_seen_more_requests_than_a_cell_can_name_reports_its_blocks() -> None:
    core = core_with(6)
    core.scheduler.groups["r0"].arrival = (1 << 33) + 5
    core.step()
    state = report(core)
    [number] = state.requests
    assert kinds(state).count((USED, number)) == 2


def test_blocks_of_an_ended_request_are_cached_and_its_timeline_is_there() -> None:
    core = core_with(6)
    while core.has_unfinished():
        core.step()
    state = report(core)
    assert {kind for kind, _ in kinds(state)} == {FREE, CACHED}
    assert [each.request_id for each in state.ended] == ["r0"]
    assert [each.kind for each in state.decisions] == ["admitted"]
    core.clock.time += 100  # type: ignore[attr-defined]
    late = report(core, within_s=10)
    assert (late.ended, late.decisions) == ([], [])


def test_shared_and_pinned_blocks_are_told_apart() -> None:
    core = make_core(num_blocks=16, block_size=4)
    core.add_request(make_request("fork", range(9), n=2, max_tokens=5))
    core.step()
    core.step()
    assert {kind for kind, owner in kinds(report(core)) if owner} == {USED, SHARED}
    while core.has_unfinished():
        core.step()
    core.pin_prefix(list(range(8)), 1e6)
    assert [kind for kind, _ in kinds(report(core))].count(PINNED) == 2


def test_a_swapped_request_is_on_the_map_of_the_host() -> None:
    core = core_with(14, 14, num_host_blocks=8, preemption_mode="swap")
    for _ in range(40):
        state = report(core)
        swapped = [number for number, each in state.requests.items() if each.state == "swapped"]
        if swapped or not core.has_unfinished():
            break
        core.step()
    assert swapped
    assert {owner for _, owner in kinds(state, "host")} == {0, *swapped}
