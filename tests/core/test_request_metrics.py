"""Times of a request under octavo's names and vLLM's."""

from __future__ import annotations

from octavo.core.outputs import RequestMetrics


def test_times_have_the_names_of_vllm() -> None:
    metrics = RequestMetrics.begin(1.0)
    assert (metrics.queued_ts, metrics.scheduled_ts, metrics.first_token_latency) == (1.0, None, None)
    metrics.first_scheduled_time, metrics.first_token_time, metrics.last_token_time = 2.0, 4.0, 5.0
    assert (metrics.scheduled_ts, metrics.first_token_ts, metrics.last_token_ts) == (2.0, 4.0, 5.0)
    assert metrics.first_token_latency == 3.0
