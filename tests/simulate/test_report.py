"""Figures of a simulation, as a table and as JSON."""

from __future__ import annotations

import pytest

from octavo.simulate.outcome import Outcome, RequestRecord, Sample, Totals
from octavo.simulate.report import Run, Spread, summarize, table, to_json


def outcome() -> Outcome:
    records = [
        RequestRecord(
            number=i,
            arrival_s=float(i),
            first_scheduled_s=i + 0.5,
            first_token_s=i + 1.0,
            finished_s=i + 3.0,
            num_sequences=2,
            num_prompt_tokens=10,
            num_output_tokens=10,
            num_cached_tokens=4,
        )
        for i in range(4)
    ]
    records.append(RequestRecord(number=4, arrival_s=4.0, finished_s=4.0, num_prompt_tokens=99, error="too large"))
    samples = [Sample(0.0, 0, 0, 0, 0.0, 0.0), Sample(3.0, 2, 4, 3, 1.0, 0.8), Sample(9.0, 5, 9, 0, 2.0, 1.0)]
    return Outcome(
        records,
        samples,
        2,
        Totals(
            num_steps=9,
            busy_s=6.0,
            num_preemptions=1,
            num_swapped_blocks=2,
            num_recomputed_tokens=3,
            gaps={-230: 98, 0: 2},
        ),
    )


def test_percentiles_are_by_nearest_rank() -> None:
    assert Spread.of(range(1, 101)) == Spread(50.5, 50, 90, 99)
    assert Spread.of([7.0]) == Spread(7.0, 7.0, 7.0, 7.0)
    assert Spread.of([]) == Spread(0.0, 0.0, 0.0, 0.0)


def test_a_summary_counts_what_was_served() -> None:
    summary = summarize(outcome())
    assert (summary.num_requests, summary.num_failed, summary.duration_s) == (5, 1, 6.0)
    assert (summary.requests_per_s, summary.output_tokens_per_s) == (4 / 6, 40 / 6)
    assert (summary.time_in_queue_s.p50, summary.time_to_first_token_s.p99) == (0.5, 1.0)
    assert summary.time_per_output_token_s.mean == 2 / 4  # five tokens each, of two sequences side by side
    assert (summary.latency_s.p90, summary.cached_share, summary.utilization) == (3.0, 0.4, 0.5)
    # samples after the end do not count
    assert (summary.mean_kv_usage, summary.max_kv_usage, summary.max_waiting) == (0.25, 0.8, 7)


def test_the_table_names_what_there_is() -> None:
    text = table(Run(summarize(outcome()), outcome()))
    assert "5 requests on 2 replicas, 1.25 a second offered, 1 refused" in text
    assert "time to first token" in text
    assert "1; 3 tokens computed again, 2 blocks moved" in text


def test_json_holds_the_summary_and_the_state_over_time() -> None:
    values = to_json(Run(summarize(outcome()), outcome(), 2.0))
    assert (values["request_rate"], values["latency_s"]["p50"]) == (2.0, 3.0)
    assert values["over_time"][1] == {
        "time_s": 3.0,
        "num_running": 2,
        "num_waiting": 4,
        "num_swapped": 3,
        "kv_usage": 0.5,
        "max_kv_usage": 0.8,
    }
    assert values["percentiles"]["latency_s"] == [3.0] * 101


def test_percentiles_of_times_between_tokens_come_from_their_counts() -> None:
    spread = summarize(outcome()).time_between_tokens_s
    assert spread.p50 == spread.p90 == pytest.approx(0.1, rel=0.01)
    assert spread.p99 == 1.0
