"""How many guesses would pay, in words, before a step is measured."""

from __future__ import annotations

from octavo.config.schema import SpeculativeConfig
from octavo.speculation.length import StepBudget, StepCosts

_SHOWN_TOKENS = (1, 2, 4, 8, 12, 16, 24, 32, 64)
_SHOWN_BATCHES = (1, 4, 16, 64)
_SHOWN_RATES = (0.5, 0.7, 0.9)


def speculation_facts(config: SpeculativeConfig) -> list[tuple[str, object]]:
    """Return the assumptions from which the number of guesses is chosen, and the number for some loads."""
    seconds = StepCosts(config.step_ms).seconds()
    unit = seconds[1]
    curve = ", ".join(f"{count}: {seconds[count] / unit:.2f}" for count in _SHOWN_TOKENS)
    because = "measured by octavo bench calibrate" if config.step_ms else "assumed until steps are measured"
    facts: list[tuple[str, object]] = [
        ("method", f"{config.method}, at most {config.num_speculative_tokens} guesses for a sequence in a step"),
        ("time of a step by its tokens", f"{curve} times that of one ({because})"),
    ]
    for rate in _SHOWN_RATES:
        taken = []
        for num_rows in _SHOWN_BATCHES:
            budget = StepBudget(seconds, num_rows)
            counts = [budget.take(rate, config.num_speculative_tokens) for _ in range(num_rows)]
            taken.append(f"{num_rows}: {sum(counts) / num_rows:.3g}")
        facts.append((f"guesses, {rate:.0%} right", f"{', '.join(taken)} for each of so many sequences"))
    if config.has_model:
        facts.append(("its own time", "is measured too, and lowers these numbers"))
    return facts
