"""The core's loop: steps in flight, control calls, and its end."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from octavo.config.explain import MemoryPlan
from octavo.core.cache_limits import CacheLimits
from octavo.engine.engine_core import EngineCore
from octavo.errors import ConfigError
from tests.config.test_explain import PLAN
from tests.fakes.core import engine_config
from tests.fakes.engine import make_core, make_request, run
from tests.fakes.executor import HashExecutor


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_any_depth_gives_the_same_tokens(depth: int) -> None:
    requests = [make_request(f"r{i}", range(i, i + 9), n=1 + i % 2, max_tokens=7) for i in range(5)]
    shallow = run(make_core(depth=1), requests)
    deep = run(make_core(depth=depth), requests)
    assert (deep.token_ids, deep.logprobs) == (shallow.token_ids, shallow.logprobs)


def test_steps_are_submitted_up_to_the_depth() -> None:
    core = make_core(depth=3)
    core.add_request(make_request("a", range(4), max_tokens=9))
    core.step()
    assert isinstance(core.executor, HashExecutor)
    assert len(core.executor.steps) == 3


def test_nothing_of_an_aborted_request_follows_not_even_what_was_kept_for_the_next_step() -> None:
    request = make_request("a", range(5), max_tokens=3)
    expected = run(make_core(), [request]).token_ids
    core = make_core(depth=2)
    core.add_request(make_request("a", range(4), max_tokens=9))
    core.step()
    core.finish_steps()
    assert core.has_news
    core.abort_requests(["a"])
    assert not core.has_news
    assert run(core, [request]).token_ids == expected


def test_a_step_with_nothing_to_do_answers_nothing() -> None:
    core = make_core()
    assert core.step().outputs == []
    assert not core.has_unfinished()


def test_control_calls_go_by_name() -> None:
    core = make_core(num_blocks=7)
    assert core.call("stats")["num_blocks"] == 7
    with pytest.raises(ConfigError, match="fly is not a control call"):
        core.call("fly")


class Ranks:
    """An executor whose ranks have room for different numbers of blocks."""

    sends_tokens = False

    def __init__(self, planned: list[MemoryPlan], measured: list[MemoryPlan]) -> None:
        self.plans = {"prepare": planned, "load": measured}
        self.calls: dict[str, tuple[Any, ...]] = {}

    def call(self, method: str, *arguments: Any) -> list[Any]:
        self.calls[method] = arguments
        return list(self.plans.get(method, [None, None, None]))

    def shutdown(self) -> None: ...


def test_a_start_takes_the_blocks_that_every_rank_has_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def plan(num_blocks: int, num_host_blocks: int) -> MemoryPlan:
        limits = CacheLimits.of_one_group(num_blocks, 16, num_host_blocks=num_host_blocks, block_bytes=1 << 10)
        return msgspec.structs.replace(PLAN, cache=limits, max_model_len=num_blocks)

    planned = [plan(190, 5), plan(170, 9), plan(180, 7)]
    ranks = Ranks(planned, [plan(80, 9), plan(90, 5), plan(70, 7)])
    monkeypatch.setattr("octavo.engine.engine_core.make_executor", lambda *_: ranks)
    core = EngineCore.build(engine_config())
    assert ranks.calls == {"prepare": (), "load": (170, [5]), "allocate": ([70], [5])}
    assert (core.ready.cache.num_blocks, core.ready.cache.num_host_blocks) == (70, 5)
    assert "what every rank has room for" in core.ready.plan


def test_shutdown_releases_the_executor() -> None:
    core = make_core()
    core.shutdown()
    core.shutdown()
    assert isinstance(core.executor, HashExecutor)
    assert core.executor.is_shut_down


def test_dropped_requests_leave_no_output_and_their_ids_can_be_used_again() -> None:
    core = make_core(depth=2)
    core.add_request(make_request("a", range(4), max_tokens=9))
    core.step()
    core.add_requests([make_request("a", range(4), max_tokens=9), make_request("b", range(3), max_tokens=2)])
    assert core.drop_requests() == 1
    while core.has_unfinished():
        assert core.step().outputs == []
    again = [make_request("a", range(4), max_tokens=3)]
    assert run(core, again).token_ids == run(make_core(), again).token_ids
