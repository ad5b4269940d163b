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


def test_prompts_never_have_more_tokens_left_than_the_step() -> None:
    tokens = PartialBudget(4)
    tokens.take(1)
    tokens.take(2, is_prompt=True)
    assert tokens.has_tokens_for_prompts
    assert tokens.grant(5) == 1
    # the last token of a prompt that is cached otherwise is no piece of a prompt
    tokens.take(1)
    assert not tokens.has_tokens_for_prompts
    assert tokens.grant(5) == 0
