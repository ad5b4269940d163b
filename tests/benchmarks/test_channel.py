"""The measurement of the channel between ranks."""

from __future__ import annotations

from benchmarks.channel import measure


def test_a_step_goes_to_a_process_and_its_results_come_back() -> None:
    found = measure("tcp", num_rows=2, rounds=3)
    assert 0 < found["send_us"] < found["back_us"]
    assert found["bytes"] > 100
