"""A load that was measured beside its simulation: which measurement counts, and what is said of it."""

from __future__ import annotations

import msgspec
import pytest

from octavo.simulate.comparison import Comparison, Measured, check_of, expected_error, table, to_json
from octavo.simulate.cost_model import Check
from octavo.simulate.report import Summary, summarize
from tests.simulate.test_report import outcome


def slower(factor: float) -> Summary:
    """The summary of an outcome in which everything takes `factor` times as long."""
    made = outcome()
    for record in made.records:
        record.arrival_s *= factor
        record.finished_s *= factor
        if record.first_token_s is not None:
            record.first_token_s *= factor
    return summarize(made)


def test_the_measurement_with_the_shortest_requests_counts() -> None:
    undisturbed = Measured(slower(1.0), 1.0)
    assert Comparison.of("load", [Measured(slower(2.0), 0.5), undisturbed], slower(1.25)).measured is undisturbed


def test_the_error_of_the_throughput_and_its_load_are_reported() -> None:
    comparisons = [
        Comparison("one", Measured(slower(1.0), 1.0), slower(1.1)),
        Comparison("two", Measured(slower(1.0), 0.99), slower(0.8)),
    ]
    assert comparisons[1].throughput_error == pytest.approx(0.25)
    text = table(comparisons)
    assert "throughput is predicted within 25.0% (worst: two)" in text
    assert "+25.0%" in text
    assert "repeat this" not in text
    label, measured, predicted = comparisons[1].rows()[0]
    assert to_json(comparisons)["two"] | {"processor_share": 0.99} == to_json(comparisons)["two"]
    assert to_json(comparisons)["two"][label] == [measured, predicted]


def test_a_disturbed_measurement_is_called_one() -> None:
    text = table([Comparison("one", Measured(slower(1.0), 0.6), slower(1.0))])
    assert "other programs had the processor for up to 40% of the measured time" in text


def test_a_check_keeps_what_kind_of_load_it_was_and_its_errors() -> None:
    check = check_of(Comparison("one", Measured(slower(1.0)), slower(1.25)))
    assert (check.load, check.input_len, check.output_len) == ("one", pytest.approx(10), pytest.approx(10))
    assert check.throughput_error == pytest.approx(-0.2)
    assert check.first_token_error == check.token_time_error == pytest.approx(0.25)
    assert 0 < check.utilization < 1
    assert 0 < check.queued_share < 1


def test_the_error_of_the_most_similar_load_that_was_held_out_is_stated() -> None:
    like = check_of(Comparison("like it", Measured(slower(1.0)), slower(1.1)))
    long = msgspec.structs.replace(like, load="long prompts", input_len=like.input_len * 20, first_token_error=9.0)
    queued = msgspec.structs.replace(like, load="burst", queued_share=0.9, first_token_error=9.0)
    checks: list[Check] = [long, queued, like]
    text = expected_error(checks, slower(1.0))
    assert "like it" in text
    assert "+10.0% (time to first token)" in text
    assert expected_error([], slower(1.0)) == ""
