"""What is refused before it waits."""

from __future__ import annotations

import re

import pytest

from octavo.core.messages import EngineCoreRequest
from octavo.core.outputs import RequestError
from octavo.scheduler.door import Door, Load
from octavo.scheduler.standing import Standing
from tests.fakes.engine import Collected, make_core, make_request, run

IDLE = Load(8, 16)


def errors(seen: Collected) -> dict[str, RequestError]:
    return {name: final.error for name, final in seen.finals.items() if final.error is not None}


def test_without_limits_everybody_may_wait() -> None:
    load = Load(0, 0, num_queued=10**6, num_waiting=10**6, num_waiting_tokens=10**9, num_tokens_before=10**9)
    request = make_request("a", range(5))
    scheduler = make_core().scheduler
    standing = Standing([request], [0.0], lambda: (), scheduler.policy, scheduler.block_manager, 0.0)
    assert Door().refusal([request], load, IDLE, 1.0, standing) is None


def test_what_can_start_in_the_next_step_does_not_wait() -> None:
    core = make_core(max_num_seqs=8, max_queued_requests=2)
    seen = run(core, [make_request(f"r{i}", range(8), max_tokens=2) for i in range(11)])
    assert sorted(errors(seen)) == ["r10"]  # eight start, two wait


def test_sequences_of_running_and_queued_groups_are_taken() -> None:
    core = make_core(max_num_seqs=8, num_blocks=256, max_queued_requests=1)
    core.add_request(make_request("running", range(4), n=4, max_tokens=20))
    core.step()
    core.add_request(make_request("starts", range(4), n=3))
    core.add_request(make_request("waits", range(4), n=2))
    core.add_request(make_request("behind", range(4)))
    assert sorted(errors(run(core))) == ["behind"]


def test_once_a_step_has_left_requests_behind_those_that_come_wait_too() -> None:
    core = make_core(num_blocks=8, block_size=4, max_num_seqs=8, max_queued_requests=2)
    for name in ("a", "b", "c"):  # five blocks each, so that one runs, though there is room for eight sequences
        core.add_request(make_request(name, (ord(name) % 50,) * 12, max_tokens=8))
    core.step()
    core.step()
    core.step()
    assert len(core.scheduler.waiting) >= 1
    num_waiting = len(core.scheduler.waiting)
    for number in range(3):
        core.add_request(make_request(f"late{number}", range(12), max_tokens=8))
    assert len(errors(run(core))) == 1 + num_waiting


def test_an_aborted_newcomer_leaves_its_place() -> None:
    core = make_core(max_num_seqs=2, max_queued_requests=1)
    core.add_request(make_request("gone", range(4), n=2))
    core.add_request(make_request("a", range(4)))
    core.abort_requests(["gone"])
    for name in ("b", "c", "d"):
        core.add_request(make_request(name, range(4)))
    assert sorted(errors(run(core))) == ["d"]


def test_a_full_queue_refuses_with_the_time_to_come_back() -> None:
    core = make_core(max_num_seqs=1, max_queued_requests=2, prefill_tokens_per_s=1.0)
    requests = [make_request(f"r{i}", range(8), max_tokens=2) for i in range(4)]
    seen = run(core, requests)
    assert sorted(errors(seen)) == ["r3"]  # one starts, two wait
    refused = errors(seen)["r3"]
    assert refused.code == "queue_full"
    assert "max_queued_requests is 2" in refused.message
    assert refused.retry_after_s == 12  # 24 prompt tokens for two that wait
    assert refused.public_message == "the queue is full; try again later"


def test_queued_tokens_are_bounded_and_freed_when_they_run_or_leave() -> None:
    core = make_core(max_queued_tokens=20)  # 16 tokens a step
    for name in ("a", "b", "c", "d"):
        core.add_request(make_request(name, range(12)))  # 16 of 48 start
    core.abort_requests(["a"])
    core.add_request(make_request("e", range(12)))
    seen = run(core)
    assert sorted(errors(seen)) == ["d"]
    assert errors(seen)["d"].code == "queue_full"
    core.add_request(make_request("f", range(12)))
    assert run(core).finals["f"].error is None


def test_a_prompt_above_the_limit_is_taken_where_nobody_stands_before_it() -> None:
    core = make_core(max_queued_tokens=20, prefill_tokens_per_s=10.0)
    core.add_request(make_request("long", range(100), max_tokens=2))
    core.add_request(make_request("second", range(40), max_tokens=2))
    seen = run(core)
    assert sorted(errors(seen)) == ["second"]
    assert errors(seen)["second"].retry_after_s == 11  # 124 tokens wait, 20 may
    # the same when it waits for a sequence, and nobody else does
    busy = make_core(max_num_seqs=1, max_queued_tokens=20)
    busy.add_request(make_request("running", range(4)))
    busy.step()
    busy.add_request(make_request("long", range(100), max_tokens=2))
    assert errors(run(busy)) == {}


def test_a_deadline_that_cannot_be_met_is_refused_with_both_times() -> None:
    core = make_core(prefill_tokens_per_s=10.0)
    core.add_request(make_request("before", range(10)))
    soon, later = make_request("soon", range(12)), make_request("later", range(12))
    soon.first_token_deadline_s, later.first_token_deadline_s = 2.0, 3.0
    core.add_request(soon)
    core.add_request(later)
    found = errors(run(core))
    assert sorted(found) == ["soon"]
    assert found["soon"].code == "deadline_unreachable"
    assert found["soon"].retry_after_s == 1
    assert "due in 2 s" in found["soon"].message
    assert "about 2.2 s" in found["soon"].message
    assert "leaves no time for the first token" in found["soon"].public_message
    assert not re.search("[0-9]", found["soon"].public_message)


def test_a_deadline_that_not_even_an_idle_engine_meets_is_the_callers_mistake() -> None:
    core = make_core(prefill_tokens_per_s=10.0)
    request = make_request("a", range(12))
    request.first_token_deadline_s = 1.0
    core.add_request(request)
    error = errors(run(core))["a"]
    assert error.is_client_error
    assert error.retry_after_s is None
    assert (error.field, error.code) == ("first_token_deadline_s", "deadline_too_short")
    assert "12 prompt tokens take about 1.2 s" in error.message
    assert error.public_message == ""  # it is of this request alone


def test_what_is_cached_needs_no_time() -> None:
    core = make_core(prefill_tokens_per_s=10.0)
    run(core, [make_request("first", range(12))])
    request = make_request("again", range(12))
    request.first_token_deadline_s = 1.0
    assert errors(run(core, [request])) == {}


@pytest.mark.parametrize("num_free", [4, 8])
def test_requests_that_come_together_are_all_taken_or_none(num_free: int) -> None:
    core = make_core(max_num_seqs=8, max_queued_requests=1)
    for number in range(8 - num_free):
        core.add_request(make_request(f"running{number}", range(4)))
    core.step()
    core.add_requests([make_request(f"r{number}", range(4)) for number in range(6)])
    found = errors(run(core))
    assert len(found) == (0 if num_free == 8 else 6)
    assert {error.code for error in found.values()} <= {"queue_full"}
    assert all(error.retry_after_s is not None for error in found.values())


def test_more_at_once_than_an_idle_engine_takes_is_the_callers_mistake() -> None:
    core = make_core(max_num_seqs=2, max_queued_requests=1)
    core.add_requests([make_request(f"r{number}", range(4)) for number in range(4)])
    error = errors(run(core))["r0"]
    assert error.is_client_error
    assert (error.field, error.code, error.retry_after_s) == ("prompt", "too_many_prompts", None)


def test_what_running_prompts_have_left_is_counted() -> None:
    core = make_core(prefill_tokens_per_s=10.0)  # 16 tokens a step
    core.add_request(make_request("running", range(48)))
    core.step()
    late = make_request("late", range(30, 40))
    late.first_token_deadline_s = 4.0
    core.add_request(late)
    error = run(core).finals["late"].error
    assert error is not None
    assert "32 prompt tokens before this request's 10 take about 4.2 s" in error.message


def test_no_deadline_is_out_of_reach_while_the_rate_is_not_known() -> None:
    core = make_core()
    request = make_request("a", range(100), max_tokens=1)
    request.first_token_deadline_s = 0.001
    core.add_request(request)
    assert run(core).finals["a"].error is None


def due(request_id: str, num_tokens: int, deadline: float | None, priority: int = 0) -> EngineCoreRequest:
    request = make_request(request_id, (ord(request_id[0]) % 50,) * num_tokens, max_tokens=1)
    request.first_token_deadline_s, request.priority = deadline, priority
    return request


@pytest.mark.parametrize("policy", ["deadline", "priority"])
def test_whom_the_policy_puts_behind_a_request_does_not_keep_it_from_its_deadline(policy: str) -> None:
    core = make_core(policy=policy, prefill_tokens_per_s=40.0, num_blocks=256)
    core.add_request(due("running", 40, None, priority=5))
    core.step()
    for number in range(10):
        core.add_request(due(f"queued{number}", 40, None, priority=5))
    core.add_request(due("urgent", 10, 9.0, priority=1))
    seen = run(core)
    assert errors(seen) == {}
    assert next(iter(seen.finals)) == "urgent"


@pytest.mark.parametrize(("policy", "num_before"), [("deadline", 64), ("priority", 64), ("fcfs", 104)])
def test_whom_the_policy_puts_before_a_request_is_counted(policy: str, num_before: int) -> None:
    core = make_core(policy=policy, prefill_tokens_per_s=100.0, num_blocks=256)
    core.add_request(due("running", 40, 0.41, priority=0))
    core.step()
    core.add_request(due("better", 40, 0.75, priority=1))
    core.add_request(due("worse", 40, 9.0, priority=3))
    core.add_request(due("late", 40, 1.0, priority=2))
    assert f"{num_before} prompt tokens before this request's 40" in errors(run(core))["late"].message


def test_requests_that_come_together_are_before_each_other_in_the_policys_order() -> None:
    def found(policy: str) -> dict[str, RequestError]:
        core = make_core(policy=policy, prefill_tokens_per_s=100.0, num_blocks=256)
        core.add_requests([due("long", 100, 9.0), due("soon", 50, 0.6)])
        return errors(run(core))

    assert found("deadline") == {}
    assert {error.code for error in found("fcfs").values()} == {"too_many_prompts"}


def test_what_is_cached_needs_no_time_behind_others_either() -> None:
    core = make_core(prefill_tokens_per_s=10.0)
    run(core, [make_request("first", range(12))])
    core.add_request(make_request("other", range(20, 21)))
    request = make_request("again", range(12))
    request.first_token_deadline_s = 0.6
    assert errors(run(core, [request])) == {}
    core.add_request(make_request("more", range(20, 28)))
    request = make_request("late", range(12))
    request.first_token_deadline_s = 0.6
    assert "8 prompt tokens before this request's 1 take about 0.9 s" in errors(run(core, [request]))["late"].message


def test_a_refusal_is_among_the_decisions() -> None:
    core = make_core(max_num_seqs=1, max_queued_requests=1, prefill_tokens_per_s=10.0)
    impossible = due("impossible", 12, 1.0)
    seen = run(core, [due(name, 4, None) for name in ("a", "b", "c")] + [impossible])
    noted = {entry.request_id: entry.because for entry in core.scheduler.log.entries if entry.kind == "refused"}
    assert noted == {name: error.message for name, error in errors(seen).items()}
    assert sorted(noted) == ["c", "impossible"]
