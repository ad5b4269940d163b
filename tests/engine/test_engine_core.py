"""The core's loop: steps in flight, control calls, and its end."""

from __future__ import annotations

import pytest

from octavo.errors import ConfigError
from tests.fakes.engine import make_core, make_request, run
from tests.fakes.executor import HashExecutor


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_any_depth_gives_the_same_tokens(depth: int) -> None:
    requests = [make_request(f"r{i}", range(i, i + 9), n=1 + i % 2, max_tokens=7) for i in range(5)]
    shallow = run(make_core(depth=1), requests)
    deep = run(make_core(depth=depth), requests)
    assert deep.token_ids == shallow.token_ids
    assert deep.logprobs == shallow.logprobs


def test_steps_are_submitted_up_to_the_depth() -> None:
    core = make_core(depth=3)
    core.add_request(make_request("a", range(4), max_tokens=9))
    core.step()
    assert isinstance(core.executor, HashExecutor)
    assert len(core.executor.steps) == 3


def test_a_step_with_nothing_to_do_answers_nothing() -> None:
    core = make_core()
    assert core.step().outputs == []
    assert not core.has_unfinished()


def test_control_calls_go_by_name() -> None:
    core = make_core(num_blocks=7)
    assert core.call("stats")["num_blocks"] == 7
    core.call("check_health")
    with pytest.raises(ConfigError, match="fly is not a control call"):
        core.call("fly")


def test_shutdown_releases_the_executor() -> None:
    core = make_core()
    core.shutdown()
    core.shutdown()
    assert isinstance(core.executor, HashExecutor)
    assert core.executor.is_shut_down
