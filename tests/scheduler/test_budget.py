"""Budgets grant what is left, or all or nothing."""

from __future__ import annotations

from octavo.scheduler.budget import PartialBudget, WholeBudget


def test_a_partial_budget_grants_what_is_left() -> None:
    budget = PartialBudget(5)
    assert budget.grant(3) == 3
    budget.take(3)
    assert budget.grant(3) == 2
    budget.refund(3)
    assert budget.grant(9) == 5


def test_a_whole_budget_grants_all_or_nothing() -> None:
    budget = WholeBudget(5)
    assert budget.grant(5) == 5
    assert budget.grant(6) == 0
