"""What came of a simulation or of a measured run: a record for each request, samples over time, and totals."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from octavo.core.messages import SchedulerStats


class RequestRecord(msgspec.Struct, gc=False):
    """What became of one request; times in seconds since the begin. `error` is None for those that were served.

    num_output_tokens: of all its sequences together, those that best_of drops too; of a beam search, its width times
    the length of its longest answer.
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
    """The state at one time, summed over replicas, `kv_usage` too. Swapped requests do not count as waiting."""

    time_s: float
    num_running: int = 0
    num_waiting: int = 0
    num_swapped: int = 0
    kv_usage: float = 0.0
    max_kv_usage: float = 0.0


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
        return cls(
            num_steps=stats.num_steps,
            busy_s=busy_s,
            num_preemptions=stats.num_preemptions,
            num_swapped_blocks=stats.num_swapped_blocks,
            num_recomputed_tokens=stats.num_recomputed_tokens,
            num_draft_tokens=stats.num_draft_tokens,
            num_accepted_tokens=stats.num_accepted_tokens,
            gaps=dict(gaps),
        )

    @classmethod
    def sum(cls, parts: Sequence[Totals]) -> Totals:
        """Return the sums over `parts`."""
        return cls(
            num_steps=sum(each.num_steps for each in parts),
            busy_s=sum(each.busy_s for each in parts),
            num_preemptions=sum(each.num_preemptions for each in parts),
            num_swapped_blocks=sum(each.num_swapped_blocks for each in parts),
            num_recomputed_tokens=sum(each.num_recomputed_tokens for each in parts),
            num_draft_tokens=sum(each.num_draft_tokens for each in parts),
            num_accepted_tokens=sum(each.num_accepted_tokens for each in parts),
            gaps=dict(sum((Counter(each.gaps) for each in parts), Counter[int]())),
        )


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


def _merged_samples(parts: Iterable[Sequence[Sample]]) -> list[Sample]:
    """Return sums at the times of the coarsest part; all others have these times too, up to their end."""
    by_time = [{sample.time_s: sample for sample in part} for part in parts]
    sums = []
    for time_s in sorted(set().union(*by_time)):
        found = [part[time_s] for part in by_time if time_s in part]
        if any(time_s not in part and time_s < max(part, default=-1.0) for part in by_time):
            continue
        sums.append(
            Sample(
                time_s,
                sum(each.num_running for each in found),
                sum(each.num_waiting for each in found),
                sum(each.num_swapped for each in found),
                sum(each.kv_usage for each in found),
                max(each.max_kv_usage for each in found),
            )
        )
    return sums
