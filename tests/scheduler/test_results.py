"""What of a step's results goes out."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from octavo.core.sequence import SequenceGroup
from octavo.core.step import PromptLogprobs, TokenLogprobs
from octavo.scheduler.results import _owed_prompt_logprobs
from tests.fakes.engine import make_core, make_request


def test_log_probabilities_of_a_prompt_go_out_once_however_often_it_is_computed() -> None:
    group = cast(SequenceGroup, SimpleNamespace(num_prompt_logprobs_sent=1))

    def owed(first: int, end: int) -> list[int] | None:
        """Positions that go out when those of [first, end) were computed; each token has its position as id."""
        tokens = [TokenLogprobs(token_id=position, logprob=-1.0) for position in range(first, end)]
        found = _owed_prompt_logprobs(group, PromptLogprobs(first_position=first, tokens=tokens))
        if found is None:
            return None
        assert found.first_position == found.tokens[0].token_id
        return [token.token_id for token in found.tokens]

    assert owed(1, 4) == [1, 2, 3]
    # preempted: all again, in other chunks
    assert owed(1, 3) is None
    assert owed(3, 6) == [4, 5]
    assert owed(6, 7) == [6]
    assert owed(1, 7) is None
    assert owed(1, 9) == [7, 8]
    assert owed(11, 13) == [11, 12]
    state: Any = group
    assert state.num_prompt_logprobs_sent == 13


def test_a_request_has_the_times_of_its_first_and_its_last_token() -> None:
    core = make_core()
    core.add_request(make_request("a", range(4), max_tokens=3))
    group = core.scheduler.groups["a"]
    for now in (5.0, 7.0, 9.0):
        step = core.scheduler.schedule(now)
        assert step is not None
        core.scheduler.update(core.executor.submit(step).result(), now + 1)
    assert (group.metrics.first_token_time, group.metrics.last_token_time) == (6.0, 10.0)


def test_a_request_that_is_preempted_behind_a_result_has_its_events_in_order() -> None:
    core = make_core(depth=2)
    core.add_request(make_request("a", range(4), max_tokens=9))
    core.step()
    assert core.reset_prefix_cache(preempts=True)
    times, events = zip(*core.scheduler.groups["a"].metrics.timeline, strict=True)
    assert events == ("queued", "scheduled", "first token", "preempted, to be recomputed")
    assert list(times) == sorted(times)
