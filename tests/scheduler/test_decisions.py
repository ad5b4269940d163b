"""The log of decisions keeps what is worth reading."""

from __future__ import annotations

from octavo.scheduler.decisions import DecisionLog
from tests.fakes.engine import make_request


def test_a_flood_of_refusals_pushes_nothing_else_out() -> None:
    log = DecisionLog(size=4, num_refused=3)
    log.begin(1, 0.5)
    log.note("admitted", make_request("a", [1]))
    for number in range(10):
        log.note("refused", make_request(f"r{number}", [1]), "full")
    log.begin(2, 0.7)
    log.note("preempted", make_request("a", [1]))
    assert [entry.request_id for entry in log.entries] == ["a", "r7", "r8", "r9", "a"]


def test_what_goes_on_is_one_entry_with_the_last_reason() -> None:
    log = DecisionLog()
    for step in range(1, 4):
        log.begin(step, float(step))
        log.note("blocked", make_request("a", [1]), f"reason {step}")
        log.note("admitted", make_request("b", [1]))
    log.begin(9, 9.0)
    log.note("blocked", make_request("a", [1]), "again")
    blocked = [(each.step, each.last_step, each.because) for each in log.entries if each.kind == "blocked"]
    assert blocked == [(1, 3, "reason 3"), (9, 9, "again")]


def test_an_entry_has_the_tenant_of_its_request() -> None:
    log, request = DecisionLog(), make_request("a", [1])
    request.tenant = "alice"
    log.note("admitted", request)
    log.note("admitted", make_request("b", [1]))
    assert [entry.tenant for entry in log.entries] == ["alice", None]
