"""Guesses in simulated time: they save steps as far as they are right, and change no output."""

from __future__ import annotations

from octavo.config.speculative_args import SpeculativeConfig
from octavo.simulate.outcome import Outcome
from octavo.simulate.simulation import Simulation, simulate
from octavo.simulate.speculation import Guessing
from octavo.simulate.traces import Trace, TraceRequest
from tests.simulate.parts import make_costs, make_settings


def run(acceptance: float | None, num_requests: int = 3) -> Outcome:
    config = SpeculativeConfig(method="ngram", num_speculative_tokens=4)
    simulation = Simulation(
        settings=make_settings(num_blocks=200, max_num_batched_tokens=64),
        cost_model=make_costs(),
        guessing=None if acceptance is None else Guessing(config, acceptance),
    )
    requests = [TraceRequest(arrival_s=i, num_prompt_tokens=10, output_len=60 + i) for i in range(num_requests)]
    return simulate(Trace(requests), simulation)


def test_right_guesses_save_steps_and_wrong_ones_none() -> None:
    plain, never, half, always = (run(acceptance).totals for acceptance in (None, 0.0, 0.5, 1.0))
    assert plain.num_steps == never.num_steps > 1.4 * half.num_steps > 2 * always.num_steps
    assert plain.num_draft_tokens == 0 == never.num_accepted_tokens
    assert always.num_accepted_tokens == always.num_draft_tokens > 100


def test_outputs_are_as_long_as_the_trace_says() -> None:
    for acceptance in (None, 0.5, 1.0):
        assert [each.num_output_tokens for each in run(acceptance).records] == [60, 61, 62]
