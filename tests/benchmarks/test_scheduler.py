"""The measurements of the control plane run, and measure what they say."""

from __future__ import annotations

from benchmarks.scheduler import measure_cache_engine, measure_forks, measure_steps, measure_swaps


def test_every_measurement_gives_times_or_rates() -> None:
    for figures in (
        measure_steps(num_sequences=3, num_waiting=1, num_steps=8, prompt_len=20),
        measure_forks(num_blocks=3, repetitions=3),
        measure_swaps(num_blocks=3, repetitions=3),
        measure_cache_engine(num_blocks=2, threads=1, repetitions=1),
    ):
        assert all(figure > 0 for figure in figures.values())
