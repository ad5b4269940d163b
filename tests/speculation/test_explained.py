"""What is said of speculation before it runs."""

from __future__ import annotations

from octavo.config.schema import SpeculativeConfig
from octavo.speculation.explained import speculation_facts


def test_the_curve_and_the_guesses_of_some_loads_are_shown() -> None:
    facts = dict(speculation_facts(SpeculativeConfig(method="ngram", num_speculative_tokens=8)))
    assert "assumed until steps are measured" in str(facts["time of a step by its tokens"])
    assert str(facts["guesses, 90% right"]).startswith("1: 8, ")
    measured = SpeculativeConfig(method="draft_model", model="a", step_ms=((1, 10.0), (4, 11.0), (8, 30.0)))
    facts = dict(speculation_facts(measured))
    assert "8: 3.00, " in str(facts["time of a step by its tokens"])
    assert "measured by octavo bench calibrate" in str(facts["time of a step by its tokens"])
    assert str(facts["guesses, 90% right"]).startswith("1: 3, 4: 0")
    assert "its own time" in facts
