"""The measurements of the control plane run, and measure what they say."""

from __future__ import annotations

from benchmarks.scheduler import Load, measure_cache_engine, measure_forks, measure_steps, measure_swaps


def test_every_measurement_gives_times_or_rates() -> None:
    for figures in (
        measure_steps(3, Load(1, 8, 20, None, "fcfs", 0)),
        measure_steps(3, Load(2, 8, 20, None, "priority", 2)),
        measure_forks(num_blocks=3, repetitions=3),
        measure_swaps(num_blocks=3, repetitions=3),
        measure_cache_engine(num_blocks=2, threads=1, repetitions=1),
    ):
        assert all(figure > 0 for figure in figures.values())
