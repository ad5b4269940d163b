"""Counts of an engine in process as objects under vLLM's names."""

from __future__ import annotations

from pathlib import Path

from octavo.core.messages import SchedulerStats
from octavo.core.outputs import RequestMetrics
from octavo.engine.output.metric_reader import Counter, Gauge, Histogram, Vector, read_metrics
from octavo.engine.output.request_counts import RequestCounts
from tests.test_llm import make_llm

LABELS = {"engine": "0", "model_name": "m"}


def test_counts_have_their_kind_and_the_names_of_vllm() -> None:
    stats = SchedulerStats(num_running=2, num_prompt_tokens=7, accepted_per_position=[3, 0, 1])
    found = read_metrics("m", stats, RequestCounts())
    assert Gauge(name="vllm:num_requests_running", labels=LABELS, value=2.0) in found
    assert Counter(name="vllm:prompt_tokens", labels=LABELS, value=7) in found
    assert Vector(name="vllm:spec_decode_num_accepted_tokens_per_pos", labels=LABELS, values=[3, 0, 1]) in found


def test_times_and_lengths_of_requests_are_in_histograms() -> None:
    counts = RequestCounts()
    for arrival_time in (1.0, 1.375):
        times = RequestMetrics(arrival_time=arrival_time, first_token_time=1.5, finished_time=2.0)
        counts.observe_request(times, num_prompt_tokens=3, num_generated_tokens=[4], finish_reasons=["stop"])
    found = {metric.name: metric for metric in read_metrics("m", SchedulerStats(), counts)}
    first = found["vllm:time_to_first_token_seconds"]
    assert isinstance(first, Histogram)
    assert (first.labels, first.count, first.sum) == (LABELS, 2, 0.625)
    assert {limit: first.buckets[limit] for limit in ("0.1", "0.3", "0.5", "+Inf")} == {
        "0.1": 0,
        "0.3": 1,
        "0.5": 2,
        "+Inf": 2,
    }
    assert list(first.buckets)[-1] == "+Inf"
    ended = {**LABELS, "finished_reason": "stop"}
    assert found["vllm:request_success"] == Counter(name="vllm:request_success", labels=ended, value=2)


def test_the_metrics_of_an_llm_count_its_requests(tmp_path: Path) -> None:
    llm = make_llm(tmp_path)
    llm.generate(["abc", "ab"])
    found = {metric.name: metric for metric in llm.get_metrics()}
    assert {metric.labels["model_name"] for metric in found.values()} == {llm.config.model.served_model_names[0]}
    lengths = found["vllm:request_prompt_tokens"]
    assert isinstance(lengths, Histogram)
    assert (lengths.count, lengths.sum) == (2, 5)
