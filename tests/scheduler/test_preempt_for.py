"""The victims of a better waiting group are worked out once, and again when a group has ended."""

from __future__ import annotations

from collections.abc import Sequence as SequenceABC

import pytest

from octavo.core.messages import EngineCoreRequest
from octavo.core.sequence import SequenceGroup
from octavo.engine.engine_core import EngineCore
from octavo.scheduler.policies.priority import Priority
from tests.fakes.engine import make_core, make_request, run


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The groups for which the policy was asked for victims."""
    heads: list[str] = []
    ask = Priority.victims_for

    def victims_for(
        policy: Priority, head: SequenceGroup, running: SequenceABC[SequenceGroup]
    ) -> SequenceABC[SequenceGroup]:
        heads.append(head.request_id)
        return ask(policy, head, running)

    monkeypatch.setattr(Priority, "victims_for", victims_for)
    return heads


def request(name: str, num_tokens: int, priority: int, max_tokens: int = 20) -> EngineCoreRequest:
    made = make_request(name, [ord(name[0]) % 50] * num_tokens, max_tokens=max_tokens)
    made.priority = priority
    return made


def blocked_core() -> EngineCore:
    """`best` holds so much that all that is worse does not make room for `head`."""
    core = make_core(num_blocks=16, policy="priority", max_num_batched_tokens=64, enable_prefix_caching=False)
    for each in (request("best", 30, 0, max_tokens=6), request("worse", 6, 9), request("also", 6, 9)):
        core.add_request(each)
    core.step()
    core.add_request(request("head", 49, 5, max_tokens=4))
    return core


def test_what_was_in_vain_is_not_tried_again_while_nobody_leaves(asked: list[str]) -> None:
    core = blocked_core()
    for _ in range(4):
        core.step()
    assert asked == ["head"]
    assert core.stats().num_preemptions == 0


def test_it_is_tried_again_when_somebody_has_left(asked: list[str]) -> None:
    core = blocked_core()
    while core.stats().num_preemptions == 0:
        core.step()
    # best has ended; one of the two others made room, and no more than that
    assert [group.request_id for group in core.scheduler.running] in (["worse", "head"], ["also", "head"])
    assert asked.count("head") == 2
    run(core)
