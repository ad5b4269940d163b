"""A step's plan: all budgets grant a group or a row, and a row that is dropped is refunded to all."""

from __future__ import annotations

from octavo.core.sequence import SequenceGroup
from octavo.core.step import ScheduledSequence
from octavo.scheduler.budget import AdapterBudget, EncoderBudget, EncoderInput, SequenceBudget, TokenBudget
from octavo.scheduler.plan import StepPlan
from tests.fakes.engine import make_request


def group(name: str, adapter: str | None = None, n: int = 1) -> SequenceGroup:
    request = make_request(name, range(9), n=n)
    request.adapter = adapter
    return SequenceGroup(request, 0, 0)


def make_plan() -> StepPlan:
    images = EncoderBudget(10, lambda _: [EncoderInput(3, 8)])
    return StepPlan(TokenBudget(12), AdapterBudget(1, []), SequenceBudget(3), images)


def reason(plan: StepPlan, waiting: SequenceGroup) -> str | None:
    budget = plan.lacking(waiting)
    return None if budget is None else budget.reason(waiting)


def test_a_group_is_granted_by_all_budgets_or_refused_by_the_first_that_lacks() -> None:
    plan, first = make_plan(), group("a", adapter="x", n=2)
    assert reason(plan, first) is None
    plan.admit(first)
    assert reason(plan, group("b", n=2)) == "needs 2 sequences, 1 more may run"
    both = group("c", adapter="y", n=2)
    assert reason(plan, both) == "adapter y needs a slot, all 1 are in use (max_loras)"
    assert plan.num_missing(both) == (0, 1, 1, 0)
    plan.release(first)
    assert reason(plan, both) is None


def test_a_plan_is_full_when_one_budget_is() -> None:
    plan = make_plan()
    assert not plan.is_full
    plan.admit(group("a", n=3))
    assert plan.is_full


def test_a_row_has_what_all_budgets_grant_and_a_dropped_one_is_refunded_to_all() -> None:
    plan, first, second = make_plan(), group("a"), group("b")
    sequence = first.live[0]
    assert plan.grant(first, 0, 9) == 9
    plan.take(first, 0, 9, 9)
    plan.rows[sequence.seq_id] = ScheduledSequence(sequence.seq_id, 0, 0, 9, 1)
    # three tokens are left, and the second image does not fit
    assert plan.grant(second, 0, 9) == 3
    assert plan.grant(second, 3, 9) == 0
    assert plan.num_prompt_tokens == 9
    dropped = plan.drop(first, sequence)
    assert dropped is not None
    assert dropped.row.num_tokens == 9
    assert plan.grant(second, 0, 9) == 9
    assert plan.num_prompt_tokens == 0
    assert plan.drop(first, sequence) is None
