"""How many guesses pay follows from measured steps and from how often guesses were right."""

from __future__ import annotations

import numpy as np

from octavo.speculation.length import MOST_TOKENS, Acceptance, StepBudget, StepCosts, Tally


def costs_of(seconds: dict[int, float]) -> StepCosts:
    costs = StepCosts()
    for num_tokens, each in seconds.items():
        for _ in range(40):
            costs.note(num_tokens, each)
    return costs


def test_measured_steps_are_met_and_those_between_lie_between() -> None:
    seconds = costs_of({1: 0.05, 8: 0.06, 16: 0.12}).seconds()
    assert abs(seconds[8] - 0.06) < 1e-3
    assert seconds[1] < seconds[4] < seconds[8] < seconds[12] < seconds[16]


def test_one_slow_step_is_no_measurement() -> None:
    costs = costs_of({1: 0.05})
    costs.note(1, 5.0)
    assert costs.seconds()[1] < 0.07


def test_a_measurement_is_forgotten() -> None:
    costs = costs_of({1: 0.05, 8: 0.5})
    for _ in range(2000):
        costs.note(1, 0.05)
    assert costs.seconds()[8] < 0.1


def test_free_tokens_are_filled_with_likely_guesses() -> None:
    seconds = costs_of({1: 0.05, 8: 0.05, 9: 0.1, 32: 0.4}).seconds()
    assert StepBudget(seconds, 1).take(0.95, 16) == 7
    assert StepBudget(seconds, 1).take(0.95, 3) == 3
    assert StepBudget(seconds, 1).take(0.0, 16) == 0


def test_where_each_token_costs_as_much_none_is_guessed() -> None:
    seconds = costs_of({1: 0.01, 2: 0.02, 4: 0.04, 8: 0.08, 64: 0.64}).seconds()
    budget = StepBudget(seconds, 4)
    assert not budget.may_pay
    assert budget.take(0.99, 16) == 0


def test_guesses_that_are_computed_again_count_twice() -> None:
    seconds = costs_of({1: 0.05, 8: 0.05, 9: 0.1, 32: 0.4}).seconds()
    assert StepBudget(seconds, 1, repeats=True).take(0.95, 16) == 3
    assert StepBudget(seconds, 1, repeats=True).take(0.4, 16) == 6


def test_sequences_share_the_free_tokens() -> None:
    budget = StepBudget(costs_of({4: 0.05, 8: 0.05, 9: 0.1, 32: 0.4}).seconds(), 4)
    first, second = budget.take(0.9, 16), budget.take(0.9, 16)
    assert first == 4
    assert second == 0


def test_a_full_step_has_no_room() -> None:
    budget = StepBudget(StepCosts().seconds(), MOST_TOKENS)
    assert not budget.may_pay
    assert budget.take(1.0, 4) == 0


def test_guesses_of_a_model_are_right_less_often_the_later_they_come() -> None:
    acceptance, own = Acceptance(), Tally()
    assert acceptance.chances("model", own, 3).tolist() == [0.6] * 3
    for number in range(200):
        num_right = (0, 1, 1, 1)[number % 4]  # the first one is right three times of four, the second one never
        acceptance.note("model", own, num_right + 1, num_right)
        acceptance.note_places("model", num_right + 1, num_right)
    first, second, third = acceptance.chances("model", Tally(), 3)
    assert 0.65 < first < 0.85
    assert second < 0.1
    assert third == second
    seconds = costs_of({1: 0.05, 8: 0.05, 9: 0.1, 32: 0.4}).seconds()
    assert StepBudget(seconds, 1).take(np.array([0.75, 0.0, 0.0]), 3) == 1
    for _ in range(500):  # nothing says any more how the second one would do
        acceptance.note_places("model", 1, 1)
    first, second, _ = acceptance.chances("model", Tally(), 3)
    assert second > 0.7 * first


def test_acceptance_is_learned_by_kind_and_by_sequence() -> None:
    acceptance, good, bad = Acceptance(), Tally(), Tally()
    for _ in range(50):
        acceptance.note("long", good, 8, 8)
        acceptance.note("long", bad, 1, 0)
        acceptance.note("short", Tally(), 1, 0)
    assert acceptance.probability("long", good) > 0.9
    assert acceptance.probability("long", bad) < 0.3
    assert acceptance.probability("short", Tally()) < 0.2


def test_a_curve_from_before_the_start_is_used_and_keeps_its_shape() -> None:
    costs = StepCosts([(1, 10.0), (8, 11.0), (16, 40.0)])
    assert abs(costs.seconds()[8] - 0.011) < 1e-9
    assert abs(costs.seconds()[32] - 0.08) < 1e-9
    for _ in range(40):
        costs.note(1, 0.02)
        costs.note(16, 0.08)
    assert abs(costs.seconds()[8] - 0.022) < 1e-3


def test_fewer_tokens_never_seem_slower() -> None:
    costs = costs_of({1: 0.05, 12: 0.06})
    for _ in range(3):
        costs.note(4, 0.5)
    assert costs.seconds()[4] <= costs.seconds()[12] < 0.07


def test_the_time_of_looking_is_part_of_the_cost() -> None:
    seconds = costs_of({1: 0.05, 8: 0.05, 64: 0.4}).seconds()
    assert StepBudget(seconds, 1, search_s=0.001).take(0.1, 4)
    assert not StepBudget(seconds, 1, search_s=0.01).take(0.1, 4)


def test_what_guesses_save_is_told() -> None:
    budget = StepBudget(costs_of({1: 0.05, 8: 0.05, 64: 0.4}).seconds(), 1)
    assert budget.gain_s == 0
    assert budget.take(1.0, 3) == 3
    assert abs(budget.gain_s - 0.15) < 1e-3


def test_the_first_steps_of_a_size_are_no_measurement() -> None:
    costs = costs_of({1: 0.05})
    for seconds in (0.5, 0.5, 0.06):
        costs.note(8, seconds)
    assert 0.05 < costs.seconds()[8] < 0.061
