"""Metrics: counters only grow, each engine has its own registry, and names are those that dashboards expect."""

from __future__ import annotations

from prometheus_client import REGISTRY

from octavo.core.messages import SchedulerStats
from octavo.core.outputs import RequestMetrics
from octavo.engine.output.metrics import Metrics


def values(metrics: Metrics) -> dict[str, float]:
    lines = metrics.render().decode().splitlines()
    pairs = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    return {name.replace('{model_name="m"}', "").replace('model_name="m"', "m"): float(value) for name, value in pairs}


def test_totals_of_the_core_become_counters_and_the_rest_gauges() -> None:
    metrics = Metrics("m")
    metrics.observe_stats(SchedulerStats(num_running=3, num_waiting=2, num_blocks=8, num_generated_tokens=10))
    later = SchedulerStats(
        num_running=1,
        num_generated_tokens=15,
        num_prompt_tokens=7,
        num_pinned_blocks=4,
        num_blocks=8,
        num_used_blocks=2,
        num_host_blocks=10,
        num_used_host_blocks=9,
        num_preemptions=5,
        num_preemptions_by_swap=2,
        num_swapped_out_blocks=7,
        num_swapped_in_blocks=4,
        num_recomputed_tokens=5,
        num_queried_tokens=9,
        num_cached_tokens=6,
    )
    metrics.observe_stats(later)
    expected = {
        "generation_tokens_total": 15,
        "prompt_tokens_total": 7,
        "num_requests_running": 1,
        "num_requests_waiting": 0,
        "num_pinned_blocks": 4,
        'kv_cache_used_blocks{m,tier="device"}': 2,
        'kv_cache_used_blocks{m,tier="host"}': 9,
        'kv_cache_blocks{m,tier="device"}': 8,
        'kv_cache_blocks{m,tier="host"}': 10,
        'kv_cache_usage_perc{m,tier="device"}': 0.25,
        'kv_cache_usage_perc{m,tier="host"}': 0.9,
        'num_preemptions_total{mode="recompute",m}': 3,
        'num_preemptions_total{mode="swap",m}': 2,
        'swapped_blocks_total{direction="out",m}': 7,
        'swapped_blocks_total{direction="in",m}': 4,
        "prefix_cache_queries_total": 9,
        "prefix_cache_hits_total": 6,
        "recomputed_tokens_total": 5,
    }
    found = values(metrics)
    assert {name: found[f"octavo:{name}"] for name in expected} == expected


def test_states_of_cores_with_roles_have_them_as_labels() -> None:
    metrics = Metrics("m", {0: "prefill", 1: "decode"})
    metrics.observe_stats(SchedulerStats(num_handovers=3, num_running=1), 0)
    metrics.observe_stats(SchedulerStats(num_handover_mismatches=1), 1)
    found = values(metrics)
    prefill, decode = ('{engine="0",m,role="prefill"}', '{engine="1",m,role="decode"}')
    assert (found[f"octavo:handovers_total{prefill}"], found[f"octavo:num_requests_running{prefill}"]) == (3, 1)
    assert found[f"octavo:handover_mismatches_total{decode}"] == 1


def test_request_that_ended_is_in_every_histogram() -> None:
    metrics = Metrics("m")
    times = RequestMetrics(
        arrival_time=1.0, first_scheduled_time=1.5, first_token_time=2.0, last_token_time=4.0, finished_time=4.0
    )
    metrics.requests.observe_request(
        times, num_prompt_tokens=9, num_generated_tokens=[5, 3], finish_reasons=["stop", "length"]
    )
    found = values(metrics)
    for name, total in {
        "time_to_first_token_seconds": 1.0,
        "request_queue_time_seconds": 0.5,
        "e2e_request_latency_seconds": 3.0,
        "time_per_output_token_seconds": 0.5,
        "request_prompt_tokens": 9,
        "request_generation_tokens": 8,
        "request_max_num_generation_tokens": 5,
    }.items():
        assert found[f"octavo:{name}_sum"] == total


def test_request_without_tokens_leaves_times_out() -> None:
    metrics = Metrics("m")
    times = RequestMetrics(arrival_time=1.0, finished_time=2.0)
    metrics.requests.observe_request(times, num_prompt_tokens=9, num_generated_tokens=[0], finish_reasons=["abort"])
    found = values(metrics)
    assert found["octavo:time_to_first_token_seconds_count"] == 0
    assert found["octavo:e2e_request_latency_seconds_sum"] == 1.0


def test_engines_do_not_share_a_registry() -> None:
    first, second = Metrics("m"), Metrics("m")
    first.observe_stats(SchedulerStats(num_steps=4))
    assert (values(first)["octavo:engine_steps_total"], values(second)["octavo:engine_steps_total"]) == (4, 0)
    assert not any(name.startswith("octavo") for name in REGISTRY._names_to_collectors)


def test_dashboards_of_vllm_find_its_names_and_labels_and_the_same_values() -> None:
    metrics = Metrics("m", {0: None, 1: None})
    for number in (0, 1):
        metrics.observe_stats(
            SchedulerStats(
                num_steps=1,
                num_generated_tokens=5,
                num_prompt_tokens=7 + number,
                num_blocks=8,
                num_used_blocks=2,
                num_host_blocks=10,
                num_used_host_blocks=9,
                num_preemptions=5,
                num_preemptions_by_swap=2,
                num_fetched_tokens=3,
            ),
            number,
        )
    times = RequestMetrics(arrival_time=1, first_scheduled_time=2, first_token_time=4, last_token_time=7)
    metrics.requests.observe_request(times, num_prompt_tokens=3, num_generated_tokens=[4], finish_reasons=["stop"])
    assert b"vllm:" not in metrics.render()
    lines = metrics.render(vllm_names=True).decode().splitlines()
    found = dict(line.rsplit(" ", 1) for line in lines if line.startswith("vllm:"))
    assert {name.partition("{")[2].partition("le=")[0].count("engine=") for name in found} == {1}
    for name, value in (
        ('kv_cache_usage_perc{engine="1",model_name="m"}', "0.25"),
        ('gpu_cache_usage_perc{engine="1",model_name="m"}', "0.25"),
        ('num_preemptions_total{engine="0",model_name="m"}', "5.0"),
        ('external_prefix_cache_hits_total{engine="0",model_name="m"}', "3.0"),
        ('prompt_tokens_total{engine="1",model_name="m"}', "8.0"),
        ('request_success_total{engine="0",finished_reason="stop",model_name="m"}', "1.0"),
        ('request_max_num_generation_tokens_sum{engine="0",model_name="m"}', "4.0"),
        ('websocket_connections_active{engine="0",model_name="m"}', "0.0"),
        ('request_prefill_time_seconds_sum{engine="0",model_name="m"}', "2.0"),
        ('request_decode_time_seconds_sum{engine="0",model_name="m"}', "3.0"),
        ('request_inference_time_seconds_sum{engine="0",model_name="m"}', "5.0"),
        ('request_time_per_output_token_seconds_bucket{engine="0",le="1.0",model_name="m"}', "1.0"),
        ('time_to_first_token_seconds_bucket{engine="0",le="2.5",model_name="m"}', "0.0"),
    ):
        assert found[f"vllm:{name}"] == value, name


def test_adapters_that_run_and_wait_are_in_the_labels_that_vllm_has() -> None:
    metrics = Metrics("m")
    metrics.observe_stats(SchedulerStats())
    assert b"lora_requests_info" not in metrics.render(vllm_names=True)
    for running in (("a",), ("a", "c")):
        stats = SchedulerStats(max_adapters=2, running_adapters=running, waiting_adapters=("b",))
        metrics.observe_stats(stats)
    lines = [line for line in metrics.render(vllm_names=True).decode().splitlines() if "lora_requests_info{" in line]
    labels = 'max_lora="2",model_name="m",running_lora_adapters="a,c",waiting_lora_adapters="b"}'
    assert [line.partition("{")[2].rpartition(" ")[0] for line in lines] == [labels, f'engine="0",{labels}']
    assert all(float(line.rpartition(" ")[2]) > 1e9 for line in lines)


def test_open_websockets_are_counted() -> None:
    metrics = Metrics("m")
    with metrics.open_websocket(), metrics.open_websocket():
        assert b'octavo:open_websockets{model_name="m"} 2.0' in metrics.render()
    assert b'octavo:open_websockets{model_name="m"} 0.0' in metrics.render()


def test_open_requests_of_an_adapter_are_counted_while_there_are_any() -> None:
    metrics = Metrics("m")
    assert b"adapter_requests" not in metrics.render()
    with metrics.adapter_in_use("a", 2), metrics.adapter_in_use("b", 1):
        with metrics.adapter_in_use("a", 1):
            assert b'octavo:adapter_requests{adapter="a",model_name="m"} 3.0' in metrics.render()
        assert b'octavo:adapter_requests{adapter="a",model_name="m"} 2.0' in metrics.render()
    assert b'adapter="' not in metrics.render()
