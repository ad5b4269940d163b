"""The outcome of a simulation or of a measured run: a record for each request, samples over time, and totals."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import msgspec

from octavo.core.messages import SchedulerStats


class RequestRecord(msgspec.Struct, gc=False):
    """The result of one request; times in seconds since the begin. `error` is None for those that were served.

    num_output_tokens: tokens of all its sequences together, including those that best_of drops; for a beam search its
    width times the length of its longest answer.
    """

    number: int
    arrival_s: float
    first_scheduled_s: float | None = None
    first_token_s: float | None = None
    finished_s: float = 0.0
    num_sequences: int = 1
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    replica: int = 0
    error: str | None = None


class Sample(msgspec.Struct, gc=False, array_like=True):
    """The state at one time, summed over replicas, `kv_usage` too. Swapped requests are not counted as waiting."""

    time_s: float
    num_running: int = 0
    num_waiting: int = 0
    num_swapped: int = 0
    kv_usage: float = 0.0
    max_kv_usage: float = 0.0

    @classmethod
    def sum(cls, time_s: float, parts: Sequence[Sample]) -> Sample:
        """Return the sum of `parts`, samples of the same time."""
        sums = {name: sum(getattr(each, name) for each in parts) for name in _SUMMED}
        return cls(time_s, **sums, max_kv_usage=max(each.max_kv_usage for each in parts))


class Totals(msgspec.Struct, frozen=True, kw_only=True):
    """Counts of one engine, or sums over several. gaps: times between tokens, as `TokenGaps` counts them."""

    num_steps: int = 0
    busy_s: float = 0.0
    num_preemptions: int = 0
    num_swapped_blocks: int = 0
    num_recomputed_tokens: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    gaps: dict[int, int] = {}

    @classmethod
    def of(cls, stats: SchedulerStats, busy_s: float, gaps: Mapping[int, int]) -> Totals:
        """Return the counts of one engine since its begin."""
        return cls(busy_s=busy_s, gaps=dict(gaps), **{name: getattr(stats, name) for name in COUNTS})

    @classmethod
    def sum(cls, parts: Sequence[Totals]) -> Totals:
        """Return the sums over `parts`."""
        sums = {name: sum(getattr(each, name) for each in parts) for name in ("busy_s", *COUNTS)}
        return cls(**sums, gaps=dict(sum((Counter(each.gaps) for each in parts), Counter[int]())))


COUNTS: Final = tuple(name for name in Totals.__struct_fields__ if name.startswith("num_"))
"""The fields that `SchedulerStats` has, too."""


class Outcome(msgspec.Struct):
    """All of a simulation. `records` are in the order of the trace."""

    records: list[RequestRecord]
    samples: list[Sample]
    num_replicas: int
    totals: Totals


def merged(outcomes: Sequence[Outcome]) -> Outcome:
    """Return the outcomes of parts that do not depend on each other as one."""
    return Outcome(
        records=sorted((record for each in outcomes for record in each.records), key=lambda record: record.number),
        samples=_merged_samples([each.samples for each in outcomes]),
        num_replicas=sum(each.num_replicas for each in outcomes),
        totals=Totals.sum([each.totals for each in outcomes]),
    )


_SUMMED: Final = ("num_running", "num_waiting", "num_swapped", "kv_usage")
"""The fields of a `Sample` that are summed over parts."""


def _merged_samples(parts: Iterable[Sequence[Sample]]) -> list[Sample]:
    """Return sums at the sample times of the coarsest part; the other parts have samples at these times too, up to
    their end."""
    by_time = [{sample.time_s: sample for sample in part} for part in parts]
    sums = []
    for time_s in sorted(set().union(*by_time)):
        found = [part[time_s] for part in by_time if time_s in part]
        if any(time_s not in part and time_s < max(part, default=-1.0) for part in by_time):
            continue
        sums.append(Sample.sum(time_s, found))
    return sums
