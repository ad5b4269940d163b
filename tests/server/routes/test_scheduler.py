"""`/scheduler/decisions`."""

from __future__ import annotations

from tests.server.conftest import Served
from tests.server.raw import ask


def test_the_last_decisions_are_told_in_the_schedulers_words(server: Served) -> None:
    (decision,) = ask(server.url, "/scheduler/decisions").json["decisions"]
    assert decision["kind"] == "blocked"
    assert decision["because"] == "no blocks"
    assert (decision["step"], decision["last_step"]) == (1, 4)


def test_they_can_be_asked_for_by_request(server: Served) -> None:
    assert len(ask(server.url, "/scheduler/decisions?request_id=x").json["decisions"]) == 1
    assert ask(server.url, "/scheduler/decisions?request_id=y").json["decisions"] == []
