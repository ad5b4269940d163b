"""What a core says before a step: the requests that the step begins, and nothing in steps that begin none."""

from __future__ import annotations

from octavo.core.messages import StepOutputs
from octavo.engine.announced_executor import AnnouncedExecutor
from tests.fakes.engine import make_core, make_request, run


def test_requests_are_announced_before_the_step_that_begins_them() -> None:
    core, said = make_core(), []

    def say(message: StepOutputs) -> None:
        assert not message.outputs
        said.append((message.began, message.stats.num_steps))

    core.executor = AnnouncedExecutor.around(core, say)
    run(core, [make_request("a", range(5), max_tokens=3), make_request("b", range(30), max_tokens=3)])
    assert said == [(["a"], 1), (["b"], 2)]
    run(core, [make_request("c", range(5), max_tokens=3)])
    assert [began for began, _ in said[2:]] == [["c"]]
