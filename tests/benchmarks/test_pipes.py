"""The measurement of pipes."""

from __future__ import annotations

from benchmarks.pipes import measure


def test_tensors_go_to_a_process_over_every_pipe() -> None:
    found = measure(["shm", "tcp", "unix"], num_bytes=40_000, count=3, rounds=1)
    assert set(found) == {
        *("memcpy_gbs", "sendall_gbs", "shm_gbs", "tcp_gbs", "unix_gbs"),
        *("shm_of_memcpy", "tcp_of_sendall", "unix_of_sendall"),
    }
    assert all(value > 0 for value in found.values())
