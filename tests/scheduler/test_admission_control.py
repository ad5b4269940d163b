"""What is refused before it waits, and when to come back."""

from __future__ import annotations

import re
from typing import Any

import msgspec
import pytest

from octavo.core.messages import EngineCoreRequest
from octavo.core.outputs import RequestError
from octavo.engine.engine_core import EngineCore
from tests.fakes.engine import Collected, make_core, make_request, run


def errors(seen: Collected) -> dict[str, RequestError]:
    return {name: final.error for name, final in seen.finals.items() if final.error is not None}


def request(
    request_id: str, num_tokens: int = 4, deadline: float | None = None, priority: int = 0, **params: Any
) -> EngineCoreRequest:
    made = make_request(request_id, (ord(request_id[0]) % 50,) * num_tokens, **{"max_tokens": 2, **params})
    made.first_token_deadline_s, made.priority = deadline, priority
    return made


def requests(num: int, num_tokens: int = 8, name: str = "r", **params: Any) -> list[EngineCoreRequest]:
    return [request(f"{name}{number}", num_tokens, **params) for number in range(num)]


OPTIONS: dict[str, Any] = {"max_num_seqs": 8, "max_num_batched_tokens": 16, "num_blocks": 256}


@pytest.mark.parametrize(
    ("options", "running", "arriving", "refused", "code"),
    [
        # no limits: all wait
        ({}, [], requests(100), [], ""),
        # max_queued_requests: eight start in the next step, two wait
        ({"max_queued_requests": 2}, [], requests(11), ["r10"], "queue_full"),
        # three of eight sequences run
        ({"max_queued_requests": 2}, requests(3, 4, name="x"), requests(8), ["r7"], "queue_full"),
        # a request counts as one of the free sequences, whatever its n; four of eight run
        ({"max_queued_requests": 1}, [request("x", n=4)], requests(6, n=2), ["r5"], "queue_full"),
        # one sequence
        ({"max_queued_requests": 2, "max_num_seqs": 1}, [], requests(4), ["r3"], "queue_full"),
        # max_queued_tokens: 16 of 48 start in the next step
        ({"max_queued_tokens": 20}, [], requests(4, 12), ["r3"], "queue_full"),
        ({"max_queued_tokens": 32}, [], requests(4, 12), [], ""),
        # a prompt above the limit is admitted when no other is in the queue, also when no sequence is free
        ({"max_queued_tokens": 20}, [], [request("long", 100), request("second", 40)], ["second"], "queue_full"),
        ({"max_queued_tokens": 20, "max_num_seqs": 1}, [request("x")], [request("long", 100)], [], ""),
        # deadlines, at 10 tokens a second: with those before it (10 tokens), and alone
        ({}, [], [request("a", 10), request("b", 12, 2.0), request("c", 12, 3.0)], ["b"], "deadline_unreachable"),
        ({}, [], [request("a", 10), request("b", 12, 1.0)], ["b"], "deadline_too_short"),
        # a running prompt has 32 tokens left
        ({}, [request("x", 48)], [request("a", 10, 4.0)], ["a"], "deadline_unreachable"),
        ({}, [request("x", 48)], [request("a", 10, 4.3)], [], ""),
    ],
)  # fmt: skip
def test_what_is_refused(
    options: dict[str, Any],
    running: list[EngineCoreRequest],
    arriving: list[EngineCoreRequest],
    refused: list[str],
    code: str,
) -> None:
    core = make_core(prefill_tokens_per_s=10.0, **{**OPTIONS, **options})
    for each in running:
        core.add_request(each)
    if running:
        core.step()
    found = errors(run(core, arriving))
    assert sorted(found) == refused
    assert {error.code for error in found.values()} == ({code} if code else set())


@pytest.mark.parametrize(
    ("options", "num_running", "together", "code"),
    [
        ({"max_queued_requests": 1}, 0, requests(6), ""),
        ({"max_queued_requests": 1}, 4, requests(6), "queue_full"),
        ({"max_queued_requests": 1, "max_num_seqs": 2}, 0, requests(4), "too_many_prompts"),
        ({"max_queued_tokens": 20}, 0, requests(3, 12), ""),
        ({"max_queued_tokens": 20}, 0, requests(4, 12), "too_many_prompts"),
        # they share a deadline, and the last prompt comes after the others
        ({}, 0, requests(3, 12, deadline=3.7), ""),
        ({}, 0, requests(3, 12, deadline=3.5), "deadline_too_short"),
    ],
)
def test_requests_that_arrive_together_are_all_admitted_or_none(
    options: dict[str, Any], num_running: int, together: list[EngineCoreRequest], code: str
) -> None:
    core = make_core(prefill_tokens_per_s=10.0, **{**OPTIONS, "enable_prefix_caching": False, **options})
    for each in requests(num_running, 4, name="x", max_tokens=20):
        core.add_request(each)
    if num_running:
        core.step()
    core.add_requests(together)
    found = errors(run(core))
    assert len(found) == (len(together) if code else 0)
    for error in found.values():
        assert error.code == code
        assert error.is_client_error is (code != "queue_full")
        assert (error.retry_after_s is None) is error.is_client_error


def test_once_a_step_has_left_requests_in_the_queue_arriving_ones_wait_too() -> None:
    core = make_core(num_blocks=8, block_size=4, max_num_seqs=8, max_queued_requests=2)
    for name in ("a", "b", "c"):  # three blocks each, so that two run, though there is room for eight sequences
        core.add_request(request(name, 12, max_tokens=8))
    core.step()
    core.step()
    assert len(core.scheduler.waiting) == 1
    for each in requests(3, 12):
        core.add_request(each)
    assert sorted(errors(run(core))) == ["r1", "r2"]


def test_an_aborted_request_leaves_its_place() -> None:
    core = make_core(max_num_seqs=2, max_queued_requests=1, max_queued_tokens=16)
    for each in requests(3, 8):
        core.add_request(each)
    core.abort_requests(["r0"])
    for each in requests(2, 8, name="s"):
        core.add_request(each)
    assert sorted(errors(run(core))) == ["s1"]
    core.add_request(request("after", 12))
    assert run(core).finals["after"].error is None


QUEUE_FULL = "the queue is full"
TOO_LATE = "what was sent before leaves no time for the first token by first_token_deadline_s"


@pytest.mark.parametrize(
    ("options", "arriving", "seconds", "words", "public"),
    [
        (
            {"max_queued_requests": 2, "max_num_seqs": 1},
            requests(4, 24),
            3,  # those of a prompt
            "2 requests are waiting, and max_queued_requests is 2",
            QUEUE_FULL,
        ),
        (
            {"max_queued_tokens": 20},
            [request("a", 100), request("b", 40)],
            11,  # those of the 104 tokens too many
            "84 prompt tokens are waiting, with this request it would be 124, and max_queued_tokens is 20",
            QUEUE_FULL,
        ),
        (
            {},
            [request("a", 15), request("b", 12, 2.0)],
            2,  # those of the 15 tokens before it
            "the first token is due in 2 s, but 15 prompt tokens before this request's 12 take about 2.7 s",
            TOO_LATE,
        ),
    ],
)
def test_a_refusal_says_when_to_come_back_and_shows_clients_nothing_of_others(
    options: dict[str, Any], arriving: list[EngineCoreRequest], seconds: int, words: str, public: str
) -> None:
    seen = run(make_core(prefill_tokens_per_s=10.0, **{**OPTIONS, **options}), arriving)
    error = errors(seen)[arriving[-1].request_id]
    assert (error.message, error.retry_after_s) == (f"{words}; try again in {seconds} s", seconds)
    assert error.public_message == f"{public}; try again later"
    assert not re.search("[0-9]", error.public_message)


def test_a_deadline_that_not_even_an_idle_engine_meets_is_the_callers_mistake() -> None:
    error = errors(run(make_core(prefill_tokens_per_s=10.0), [request("a", 12, 1.0)]))["a"]
    assert error.is_client_error
    assert error.retry_after_s is None
    assert (error.field, error.code) == ("first_token_deadline_s", "deadline_too_short")
    assert "12 prompt tokens take about 1.2 s" in error.message
    assert error.public_message == ""  # it is of this request alone


@pytest.mark.parametrize(("waited_s", "is_refused"), [(0.7, False), (0.9, True), (9.0, True)])
def test_the_wait_for_a_core_counts_towards_the_deadline(waited_s: float, is_refused: bool) -> None:
    waited = msgspec.structs.replace(request("a", 12, 2.0), waited_s=waited_s)
    found = errors(run(make_core(prefill_tokens_per_s=10.0), [waited]))
    assert list(found) == ["a"] * is_refused
    if is_refused:
        assert f"due in {max(0.0, 2.0 - waited_s):.3g} s, but 0 prompt tokens before" in found["a"].message
        assert not found["a"].is_client_error


def test_what_is_cached_needs_no_time() -> None:
    core = make_core(prefill_tokens_per_s=10.0)
    run(core, [request("first", 12)])
    again = request("first", 12, 1.0)
    assert errors(run(core, [again])) == {}
    late = request("first", 12, 0.6)
    found = errors(run(core, [request("other", 8), late]))
    assert "8 prompt tokens before this request's 1 take about 0.9 s" in found["first"].message


def test_no_deadline_is_out_of_reach_while_the_rate_is_not_known() -> None:
    assert errors(run(make_core(), [request("a", 100, 0.001, max_tokens=1)])) == {}


@pytest.mark.parametrize("policy", ["deadline", "priority"])
def test_prompts_that_the_policy_computes_later_do_not_count_against_a_deadline(policy: str) -> None:
    core = make_core(policy=policy, prefill_tokens_per_s=40.0, num_blocks=256)
    core.add_request(request("running", 40, priority=5))
    core.step()
    for number in range(10):
        core.add_request(request(f"queued{number}", 40, priority=5))
    core.add_request(request("urgent", 10, 9.0, priority=1, max_tokens=1))
    seen = run(core)
    assert errors(seen) == {}
    assert next(iter(seen.finals)) == "urgent"


@pytest.mark.parametrize(("policy", "num_before"), [("deadline", 64), ("priority", 64), ("fcfs", 104)])
def test_prompts_that_the_policy_computes_earlier_are_counted(policy: str, num_before: int) -> None:
    core: EngineCore = make_core(policy=policy, prefill_tokens_per_s=100.0, num_blocks=256)
    core.add_request(request("running", 40, 0.41, priority=0))
    core.step()
    core.add_request(request("better", 40, 0.75, priority=1))
    core.add_request(request("worse", 40, 9.0, priority=3))
    core.add_request(request("late", 40, 1.0, priority=2))
    assert f"{num_before} prompt tokens before this request's 40" in errors(run(core))["late"].message


def test_a_refusal_is_among_the_decisions() -> None:
    core = make_core(max_num_seqs=1, max_queued_requests=1, prefill_tokens_per_s=10.0)
    seen = run(core, [request(name) for name in ("a", "b", "c")] + [request("impossible", 12, 1.0)])
    noted = {entry.request_id: entry.because for entry in core.scheduler.log.entries if entry.kind == "refused"}
    assert noted == {name: error.message for name, error in errors(seen).items()}
    assert sorted(noted) == ["c", "impossible"]
