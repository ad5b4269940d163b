"""Counts of an engine in process as objects under vLLM's names."""

from __future__ import annotations

from pathlib import Path

from octavo.core.messages import SchedulerStats
from octavo.engine.metric_reader import Counter, Gauge, Vector, read_metrics
from tests.test_llm import make_llm

LABELS = {"engine": "0", "model_name": "m"}


def test_counts_have_their_kind_and_the_names_of_vllm() -> None:
    stats = SchedulerStats(num_running=2, num_prompt_tokens=7, accepted_per_position=[3, 0, 1])
    found = read_metrics("m", stats)
    assert Gauge(name="vllm:num_requests_running", labels=LABELS, value=2.0) in found
    assert Counter(name="vllm:prompt_tokens", labels=LABELS, value=7) in found
    assert found[-1] == Vector(name="vllm:spec_decode_num_accepted_tokens_per_pos", labels=LABELS, values=[3, 0, 1])


def test_metrics_of_requests_are_left_out() -> None:
    names = {metric.name for metric in read_metrics("m", SchedulerStats())}
    assert "vllm:num_preemptions" in names
    assert not {name for name in names if "request_success" in name or "seconds" in name}


def test_the_metrics_of_an_llm_have_the_name_of_its_model(tmp_path: Path) -> None:
    llm = make_llm(tmp_path)
    assert {metric.labels["model_name"] for metric in llm.get_metrics()} == {llm.config.model.served_model_names[0]}
