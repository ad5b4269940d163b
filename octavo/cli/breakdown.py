"""Where the time of a decode step goes, from the step times that an engine reports."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from itertools import pairwise

from octavo.core.messages import StepTimes
from octavo.core.step_times import PARTS, PartTime

OTHER = "everything else"
"""The time in no part: the loops around them, from the begin of one step to the begin of the next."""


def medians_us(steps: Sequence[StepTimes], num_seqs: int) -> dict[str, dict[str, float]]:
    """Return microseconds by part, and of the whole `step`: `total`, `kernels`, and `host`, which is the rest.

    Medians over the plain decode steps of `num_seqs` sequences that another step follows at once.
    """
    rows: dict[str, list[PartTime]] = {name: [] for name in [*PARTS, OTHER, "step"]}
    # the end of a step is the begin of the next one; after the last of a run it is not known
    for step, following in pairwise(steps):
        if not is_plain_decode(step, num_seqs) or not following.planned:
            continue
        parts = [step.parts.get(name, PartTime()) for name in PARTS]
        whole_ns = following.began_ns - step.began_ns
        kernels_ns = sum(part.kernels_ns for part in parts)
        other = PartTime(whole_ns - sum(part.total_ns for part in parts))
        for name, part in zip(rows, [*parts, other, PartTime(whole_ns, kernels_ns)], strict=True):
            rows[name].append(part)
    assert rows["step"], "no step was a plain decode step"
    return {name: _medians(times) for name, times in rows.items()}


def table(medians: dict[str, dict[str, float]]) -> str:
    """Return the result of `medians_us` as a text table."""
    columns = ("total", "kernels", "host")
    lines = [f"  {'µs per step':22}" + "".join(f"{column:>11}" for column in columns)]
    for name, row in medians.items():
        lines.append(f"  {name:22}" + "".join(f"{row[column]:11,.1f}" for column in columns))
    return "\n".join(lines)


def is_plain_decode(step: StepTimes, num_seqs: int) -> bool:
    """Return whether `num_seqs` sequences computed a token each in the step and nothing else happened."""
    if len(step.planned) != 1:
        return False
    (plan,) = step.planned
    return len(plan.rows) == plan.num_tokens == num_seqs and not plan.new_sequences and not plan.finished_ids


def _medians(times: list[PartTime]) -> dict[str, float]:
    return {
        "total": statistics.median(each.total_ns for each in times) / 1e3,
        "kernels": statistics.median(each.kernels_ns for each in times) / 1e3,
        "host": statistics.median(each.total_ns - each.kernels_ns for each in times) / 1e3,
    }
