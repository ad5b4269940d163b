"""Routers: what they look at, what they remember, and what they do while a replica is away."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from octavo.core.messages import EngineCoreRequest
from octavo.engine.cores.router import LeastLoaded, PrefixAware, RoundRobin, Router, Session
from tests.fakes.engine import make_request


@dataclass
class Replica:
    number: int
    num_open: int = 0


def replicas(*loads: int) -> list[Replica]:
    return [Replica(number, load) for number, load in enumerate(loads)]


def chosen(router: Router, request: EngineCoreRequest, among: list[Replica]) -> int:
    return router.choose(request, among).number


def of_session(salt: str | None, tenant: str | None = None) -> EngineCoreRequest:
    request = make_request("r", [1])
    request.cache_salt, request.tenant = salt, tenant
    return request


@pytest.mark.parametrize("router", [RoundRobin(), LeastLoaded()])
def test_routers_say_whether_they_look_at_replicas(router: Router) -> None:
    request = make_request("r", range(8))
    first, second = (chosen(router, request, replicas(1, 0)) for _ in range(2))
    assert (first == second == 1) is router.needs_feedback


def test_turns_go_on_behind_a_replica_that_is_away() -> None:
    router, request = RoundRobin(), make_request("r", [1])
    assert [chosen(router, request, replicas(0, 0, 0)) for _ in range(2)] == [0, 1]
    without_third = replicas(0, 0)
    assert [chosen(router, request, without_third) for _ in range(3)] == [0, 1, 0]


def test_a_router_forgets_what_it_used_longest_ago() -> None:
    router = PrefixAware(block_size=4, capacity=3)
    for name, load in ((1, 0), (2, 1), (3, 1)):
        router.choose(make_request("r", [name] * 8), replicas(load, 0))
    # the first was sent to replica 0; forgotten, it goes to the least loaded one
    assert chosen(router, make_request("r", [1] * 8), replicas(1, 0)) == 1


def test_the_first_blocks_of_a_prompt_are_forgotten_last() -> None:
    router = PrefixAware(block_size=4, capacity=3)
    router.choose(make_request("r", [1] * 8), replicas(0, 1))
    router.choose(make_request("r", [2] * 8), replicas(0, 1))
    assert chosen(router, make_request("r", [1] * 8), replicas(1, 0)) == 0


def test_a_prefix_goes_where_it_was_and_elsewhere_while_that_replica_is_away() -> None:
    router, request = PrefixAware(block_size=4), make_request("r", [1] * 8)
    assert chosen(router, request, replicas(1, 0)) == 1
    assert chosen(router, request, replicas(0, 2)) == 1
    assert chosen(router, request, replicas(0)) == 0
    assert chosen(router, request, replicas(2, 0)) == 0


def test_what_the_prefix_router_keeps_of_one_prompt_is_bounded() -> None:
    router = PrefixAware(block_size=1)
    router.choose(make_request("r", range(10_000)), replicas(0, 0))
    assert len(router._sent._sent_to) == 256


def test_a_session_stays_and_only_those_of_a_replica_that_is_away_move() -> None:
    router, all_three = Session(), replicas(0, 0, 0)
    sessions = [of_session(f"salt {number}") for number in range(60)]
    before = [chosen(router, each, all_three) for each in sessions]
    assert set(before) == {0, 1, 2}
    after = [chosen(router, each, all_three[:2]) for each in sessions]
    assert [here == there for here, there in zip(before, after, strict=True)] == [here != 2 for here in before]


def test_a_session_is_a_salt_or_else_a_tenant_or_else_nothing() -> None:
    router, loads = Session(), replicas(5, 5, 0)
    assert chosen(router, of_session("s", "alice"), loads) == chosen(router, of_session("s", "bob"), loads)
    assert chosen(router, of_session(None, "s"), loads) == chosen(router, of_session("s"), loads)
    assert chosen(router, of_session(None), loads) == 2
