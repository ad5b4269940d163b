"""Requests that bring output tokens: they end at once where they need no more, and count as having run before."""

from __future__ import annotations

from typing import Any

import pytest

from octavo.core.messages import EngineCoreRequest
from octavo.core.outputs import RequestMetrics
from octavo.core.resume import ResumedSequence
from tests.fakes.engine import Collected, make_core, make_request, run, run_alone


def behind(request: EngineCoreRequest, *nums: int, **changes: Any) -> EngineCoreRequest:
    """The request behind the first tokens of its sequences, so many of each."""
    drawn = run_alone(request).token_ids[request.request_id]
    sequences = [ResumedSequence(index=index, token_ids=drawn[index][:num]) for index, num in enumerate(nums)]
    values = {name: getattr(request, name) for name in request.__struct_fields__}
    return EngineCoreRequest(**{**values, "resumed": tuple(sequences), **changes})


def rest(collected: Collected, index: int = 0) -> list[int]:
    return collected.token_ids.get("r", {}).get(index, [])


@pytest.mark.parametrize("nums", [(1, 1, 1), (1, 5, 2), (7, 7, 8), (8, 1, 3)])
def test_sequences_of_different_lengths_go_on_each_behind_its_own(nums: tuple[int, ...]) -> None:
    request = make_request("r", range(9), n=3)
    core = make_core()
    collected, alone = run(core, [behind(request, *nums)]), run_alone(request)
    for index, num in enumerate(nums):
        assert rest(collected, index) == alone.token_ids["r"][index][num:]
        assert collected.logprobs["r"].get(index) == alone.logprobs["r"][index][num:]
    assert collected.finish == alone.finish
    assert core.stats().num_generated_tokens == 24 - sum(nums)
    assert core.stats().num_prompt_tokens == 0
    assert core.scheduler.timelines[0].num_generated_tokens == 24


@pytest.mark.parametrize(
    ("params", "finish"),
    [({}, ("length", None)), ({"stop_token_ids": (7,)}, ("stop", 7)), ({"end_token_ids": (7,)}, ("stop", None))],
)
def test_what_needs_no_further_token_ends_without_a_step(params: Any, finish: tuple[str, int | None]) -> None:
    request = make_request("r", range(9), max_tokens=3, **params)
    request.resumed = (ResumedSequence(index=0, token_ids=[1, 2, 7]),)
    core = make_core()
    collected = run(core, [request])
    assert (collected.finish["r"][0], rest(collected)) == (finish, [])
    assert core.stats().num_steps == 0
    assert collected.finals["r"].metrics is not None


def test_sequences_that_had_ended_are_not_reported_again() -> None:
    request = make_request("r", range(9), n=2, max_tokens=4)
    alone = run_alone(request).token_ids["r"]
    request.resumed = (
        ResumedSequence(index=0, token_ids=[1], finish_reason="stop", stop_reason="a stop string"),
        ResumedSequence(index=1, token_ids=alone[1][:2]),
    )
    collected = run(make_core(), [request])
    assert collected.token_ids["r"] == {1: alone[1][2:]}
    request.resumed = (request.resumed[0], ResumedSequence(index=1, token_ids=[1], finish_reason="length"))
    collected = run(make_core(), [request])
    assert (collected.token_ids, collected.finals["r"].deltas) == ({}, [])


def test_it_is_behind_the_cached_prefix_of_what_it_had_drawn_and_never_of_another_salt() -> None:
    request = make_request("r", range(9), max_tokens=20)
    core = make_core()
    run(core, [request])
    for salt, num_found in ((None, 26), ("other", 0)):
        before = core.stats().num_cached_tokens
        moved = behind(request, 18, cache_salt=salt)
        assert rest(run(core, [moved])) == run_alone(request).token_ids["r"][0][18:]
        assert core.stats().num_cached_tokens - before == num_found


def test_log_probabilities_of_the_prompt_come_once() -> None:
    request = make_request("r", range(30), prompt_logprobs=0)
    assert run(make_core(), [behind(request, 3)]).prompt_logprobs == {}


def test_what_was_accepted_before_is_not_refused_for_the_load_and_goes_before_new_requests() -> None:
    core = make_core(max_num_seqs=1, max_queued_requests=1, enable_prefix_caching=False)
    waiting = [make_request(f"{number}", [number]) for number in range(2)]
    request = make_request("r", range(9))
    metrics = RequestMetrics.begin(0.0)
    metrics.note(1.0, "resumed")
    collected = run(core, [*waiting, behind(request, 3, metrics=metrics)])
    assert [each.error for each in collected.finals.values()] == [None] * 3
    assert rest(collected) == run_alone(request).token_ids["r"][0][3:]
    assert list(collected.finals) == ["r", "0", "1"]
    found = collected.finals["r"].metrics
    assert found is not None
    assert [event for _, event in found.timeline] == ["queued", "resumed", "scheduled again", "first token", "finished"]
    assert metrics.finished_time is None


def test_what_no_engine_has_produced_ends_with_an_error() -> None:
    request = make_request("r", range(9))
    request.resumed = (ResumedSequence(index=0, token_ids=[1000]),)
    error = run(make_core(), [request]).finals["r"].error
    assert error is not None
    assert (error.field, error.code, error.is_client_error) == ("resumed", "cannot_be_resumed", True)
    assert "1000" in error.message
