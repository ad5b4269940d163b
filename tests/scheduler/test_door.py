"""What is refused before it waits."""

from __future__ import annotations

from octavo.scheduler.door import Door
from tests.fakes.engine import make_core, make_request, run


def test_without_limits_everybody_may_wait() -> None:
    assert Door().refusal(make_request("a", range(5)), 10**6, 10**9, 10**6, 1.0) is None


def test_a_full_queue_refuses_with_the_time_to_come_back() -> None:
    core = make_core(max_num_seqs=1, door=Door(max_queued_requests=2), prefill_tokens_per_s=1.0)
    requests = [make_request(f"r{i}", range(8), max_tokens=2) for i in range(4)]
    seen = run(core, requests)
    errors = {name: final.error for name, final in seen.finals.items()}
    assert [name for name, error in errors.items() if error is not None] == ["r2", "r3"]
    refused = errors["r2"]
    assert refused is not None
    assert refused.code == "queue_full"
    assert "max_queued_requests is 2" in refused.message
    assert refused.retry_after_s == 8


def test_queued_tokens_are_bounded_and_freed_when_they_run_or_leave() -> None:
    core = make_core(door=Door(max_queued_tokens=20))
    core.add_request(make_request("a", range(12)))
    core.add_request(make_request("b", range(12)))
    core.abort_requests(["a"])
    core.add_request(make_request("c", range(12)))
    seen = run(core)
    assert seen.finals["b"].error is not None
    assert seen.finals["b"].error.code == "queue_full"
    assert seen.finals["c"].error is None
    core.add_request(make_request("d", range(12)))
    assert run(core).finals["d"].error is None


def test_a_deadline_that_cannot_be_met_is_refused_with_both_times() -> None:
    core = make_core(prefill_tokens_per_s=10.0)
    soon, later = make_request("soon", range(12)), make_request("later", range(12))
    soon.first_token_deadline, later.first_token_deadline = 1.0, 3.0
    core.add_request(soon)
    core.add_request(later)
    seen = run(core)
    assert seen.finals["later"].error is None
    error = seen.finals["soon"].error
    assert error is not None
    assert error.code == "deadline_unreachable"
    assert "due in 1 s" in error.message
    assert "about 1.2 s" in error.message


def test_what_running_prompts_have_left_is_counted() -> None:
    core = make_core(prefill_tokens_per_s=10.0)  # 16 tokens a step
    core.add_request(make_request("running", range(48)))
    core.step()
    late = make_request("late", range(10))
    late.first_token_deadline = 4.0
    core.add_request(late)
    error = run(core).finals["late"].error
    assert error is not None
    assert "32 prompt tokens before this request's 10 take about 4.2 s" in error.message


def test_no_deadline_is_out_of_reach_while_the_rate_is_not_known() -> None:
    core = make_core()
    request = make_request("a", range(100), max_tokens=1)
    request.first_token_deadline = 0.001
    core.add_request(request)
    assert run(core).finals["a"].error is None
