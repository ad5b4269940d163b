"""What the benchmark of disaggregated prefill makes of streams."""

from __future__ import annotations

import pytest

from benchmarks.gaps import Asked, Streamed
from benchmarks.split import figures, mixture, picture


def test_long_prompts_arrive_among_requests_that_decode() -> None:
    assert mixture(2, 100, 2, 1500, 4.0) == [
        *[Asked(0.0, 64, 100)] * 2,
        Asked(4.0, 1500, 16),
        Asked(8.0, 1500, 16),
    ]


def test_gaps_are_those_of_short_prompts_and_first_tokens_those_of_long_ones() -> None:
    load = mixture(2, 3, 1, 1500, 1.0)
    found = [Streamed(0.0, [0.5, 0.6, 0.7]), Streamed(0.0, [0.5, 0.6, 1.6]), Streamed(1.0, [4.0, 9.0, 10.0])]
    shown = figures(load, found, first_token_limit_s=2.0, gap_limit_s=0.2)
    assert shown["gap_worst_ms"] == pytest.approx(1000)
    assert shown["first_token_median_s"] == shown["first_token_worst_s"] == 3.0
    assert (shown["good_share"], shown["goodput_per_s"]) == (pytest.approx(1 / 3), pytest.approx(0.1))
    assert shown["output_tokens_per_s"] == pytest.approx(2.2)


def test_the_picture_has_a_line_for_each_server() -> None:
    load = mixture(1, 3, 1, 1500, 1.0)
    found = [Streamed(0.0, [0.5, 0.6, 1.7]), Streamed(1.0, [4.0, 9.0])]
    svg = picture(load, {"chunked": found, "split": found})
    assert svg.startswith("<svg")
    assert svg.count(">split<") == svg.count(">chunked<") > 0
