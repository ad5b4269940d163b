"""Rates come from the times that the scheduler is told."""

from __future__ import annotations

from octavo.scheduler.rates import PreemptionCosts, Rates
from tests.fakes.engine import make_core, make_request, run

ASSUMED = PreemptionCosts(prefill_tokens_per_s=100.0, swap_bytes_per_s=1000.0)
TWO_BLOCKS = 20
"""Their bytes."""


def step(rates: Rates, begin: float, end: float, *, rows: int = 1, tokens: int = 0, swap_s: float = 0.0) -> None:
    rates.note_planned(begin, rows, tokens, TWO_BLOCKS if swap_s else 0)
    rates.note_done(end, swap_s)


def test_before_the_first_step_rates_are_assumed_and_not_known() -> None:
    rates = Rates(ASSUMED)
    assert (rates.prefill_tokens_per_s, rates.swap_bytes_per_s) == (100.0, 1000.0)
    assert rates.known_prefill_tokens_per_s is None


def test_a_rate_that_is_set_is_not_measured() -> None:
    rates = Rates(ASSUMED, prefill_tokens_per_s=7.0, swap_bytes_per_s=9.0)
    step(rates, 5.0, 5.5, tokens=200, swap_s=0.1)
    assert (rates.prefill_tokens_per_s, rates.swap_bytes_per_s) == (7.0, 9.0)


def test_a_step_of_prompts_is_a_measurement() -> None:
    rates = Rates(ASSUMED)
    step(rates, 5.0, 5.5, tokens=200)
    assert rates.known_prefill_tokens_per_s == rates.prefill_tokens_per_s == 400.0


def test_steps_that_mostly_decode_or_compute_little_are_none() -> None:
    rates = Rates(ASSUMED)
    step(rates, 0.0, 1.0, rows=64, tokens=100)
    step(rates, 1.0, 2.0, tokens=31)
    step(rates, 2.0, 3.0, rows=7)
    assert rates.known_prefill_tokens_per_s is None


def test_newer_steps_count_more_and_longer_ones_too() -> None:
    rates = Rates(ASSUMED)
    step(rates, 0.0, 1.0, tokens=100)
    step(rates, 1.0, 2.0, tokens=1000)
    assert rates.prefill_tokens_per_s == (100 * 0.8 + 1000) / 1.8


def test_swaps_are_timed_by_themselves_and_not_as_computation() -> None:
    rates = Rates(ASSUMED)
    step(rates, 0.0, 1.0, tokens=100, swap_s=0.5)
    assert (rates.prefill_tokens_per_s, rates.swap_bytes_per_s) == (200.0, 2 * 10 / 0.5)


def test_of_steps_in_flight_one_begins_when_the_one_before_it_ends() -> None:
    rates = Rates(ASSUMED)
    rates.note_planned(0.0, 1, 100)
    rates.note_planned(0.1, 1, 100)
    rates.note_done(1.0, 0.0)
    rates.note_done(2.0, 0.0)
    assert rates.prefill_tokens_per_s == 100.0


def test_a_rate_that_was_set_stays() -> None:
    rates = Rates(ASSUMED, prefill_tokens_per_s=7.0)
    step(rates, 0.0, 1.0, tokens=100)
    assert rates.known_prefill_tokens_per_s == rates.prefill_tokens_per_s == 7.0


def test_the_scheduler_measures_while_it_runs() -> None:
    core = make_core(max_num_batched_tokens=64)
    # the clock counts its readings: planning is one, the result the next
    run(core, [make_request("a", range(40), max_tokens=3)])
    assert core.scheduler.rates.known_prefill_tokens_per_s == 40.0
