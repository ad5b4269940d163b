"""`octavo top`."""

from __future__ import annotations

import asyncio
import json
from collections import deque
from pathlib import Path

import pytest

from octavo.cli import top
from octavo.cli.main import EXIT_ERROR, main
from octavo.cli.top import Counters, Load, frame, line, loads
from octavo.server.schema.scheduler import Timeline, TimelineEvent
from tests.fakes.openai_server import FakeOpenAI, serve_openai

METRICS = """\
# TYPE octavo:num_requests_running gauge
octavo:num_requests_running{engine="0",model_name="m",role="prefill"} 3.0
octavo:num_requests_running{engine="1",model_name="m",role="decode"} 1.0
# TYPE octavo:num_preemptions counter
octavo:num_preemptions_total{engine="0",mode="recompute",model_name="m",role="prefill"} 2.0
octavo:num_preemptions_total{engine="0",mode="swap",model_name="m",role="prefill"} 1.0
# TYPE octavo:kv_cache_usage_perc gauge
octavo:kv_cache_usage_perc{engine="0",model_name="m",role="prefill",tier="device"} 0.5
octavo:kv_cache_usage_perc{engine="0",model_name="m",role="prefill",tier="host"} 0.9
# TYPE octavo:request_success counter
octavo:request_success_total{finished_reason="stop",model_name="m"} 5.0
"""


def test_one_look_is_a_line_of_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "key").write_text("secret\n")
    with serve_openai(FakeOpenAI(pages={"/metrics": METRICS})) as fake:
        words = ["top", "--url", f"127.0.0.1:{fake.port}", "--once", "--interval", "0.1"]
        assert main([*words, "--api-key-file", str(tmp_path / "key")]) == 0
    assert set(fake.keys) == {"Bearer secret"}
    found = json.loads(capsys.readouterr().out)
    assert found["model"] == "m"
    shown = [
        (each["replica"], each["running"], each["kv_cache_usage"], each["preemptions"]) for each in found["replicas"]
    ]
    assert shown == [("0 prefill", 3, 0.5, 3), ("1 decode", 1, 0.0, 0), ("all", 4, 0.25, 3)]


def test_rates_are_those_of_the_interval_and_never_negative() -> None:
    def counters(read_s: float, **values: float) -> Counters:
        return Counters("m", {"0": {f"vllm:{name}_total": value for name, value in values.items()}}, read_s)

    before = counters(10.0, generation_tokens=100, prompt_tokens=50, prefix_cache_queries=10, prefix_cache_hits=0)
    after = counters(12.0, generation_tokens=300, prompt_tokens=20, prefix_cache_queries=30, prefix_cache_hits=5)
    (load,) = loads(before, after)
    assert (load.generated_tokens_per_s, load.prompt_tokens_per_s, load.prefix_hit_rate) == (100.0, 0.0, 0.25)


@pytest.mark.parametrize(
    ("pages", "message"),
    [({}, "responds with 404: Not Found"), ({"/metrics": "other 1\n"}, "has no metrics of octavo or vLLM")],
)
def test_one_without_metrics_is_named(pages: dict[str, str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with serve_openai(FakeOpenAI(pages=pages)) as fake:
        assert main(["top", "--url", f"127.0.0.1:{fake.port}", "--once"]) == EXIT_ERROR
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("value", ["NaN", "+Inf", "1e999"])
def test_what_is_no_number_is_left_out(value: str, capsys: pytest.CaptureFixture[str]) -> None:
    page = METRICS.replace("} 3.0", "} " + value)
    with serve_openai(FakeOpenAI(pages={"/metrics": page})) as fake:
        assert main(["top", "--url", f"127.0.0.1:{fake.port}", "--once", "--interval", "0.1"]) == 0
    assert [each["running"] for each in json.loads(capsys.readouterr().out)["replicas"]] == [0, 1, 1]


def test_without_a_screen_each_look_is_a_line_and_a_lost_server_is_tried_again(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[object] = [METRICS, METRICS, OSError("gone"), METRICS, KeyboardInterrupt()]
    read = Counters.read

    async def scripted(server: top.OpenAIClient) -> Counters:
        look = looks.pop(0)
        if isinstance(look, KeyboardInterrupt):
            raise look
        if isinstance(look, OSError):
            raise top.ServerUnreachable("it cannot be reached")
        return await read(server)

    with serve_openai(FakeOpenAI(pages={"/metrics": METRICS})) as fake:
        monkeypatch.setattr(Counters, "read", scripted)
        assert main(["top", "--url", f"127.0.0.1:{fake.port}", "--interval", "0.1"]) == 0
    first, lost, again = capsys.readouterr().out.splitlines()
    assert (
        first == again == ("4 running, 0 waiting, 0 swapped; KV 25%; 0 prompt and 0 generated tokens/s; 3 preemptions")
    )
    assert lost == "it cannot be reached; trying again"


@pytest.mark.parametrize("timelines", ["[5]", '[{"events": 5}]', "5", "[" * 100_000])
def test_timelines_of_another_shape_are_left_out(timelines: str) -> None:
    with serve_openai(FakeOpenAI(pages={"/scheduler/timelines": f'{{"timelines": {timelines}}}'})) as fake:
        assert asyncio.run(top._recent(top.OpenAIClient(f"127.0.0.1:{fake.port}"))) == []


def test_a_screen_has_replicas_rates_and_recent_requests() -> None:
    load = Load(replica="0", running=2, kv_cache_usage=0.25, generated_tokens_per_s=1234.0, prefix_hit_rate=0.5)
    timeline = Timeline(
        request_id="cmpl-1",
        tenant=None,
        prompt_tokens=7,
        cached_tokens=0,
        completion_tokens=5,
        preemptions=0,
        events=[TimelineEvent(time=at, wall_time=at, event="queued") for at in (1.0, 3.5)],
        replica=None,
    )
    shown = frame("http://here", "m", [load], deque([1.0, 1234.0]), [timeline])
    assert max(map(len, shown.splitlines())) <= 80
    assert "at most 1,234" in shown
    assert "2.50" in shown
    assert line(load).startswith("2 running, 0 waiting")


@pytest.mark.parametrize(
    ("metric", "said"),
    [
        ("paused", "paused: requests wait until POST /resume"),
        ("sleeping", "sleeping: requests wait until POST /wake_up"),
    ],
)
def test_a_pause_and_a_sleep_are_said(metric: str, said: str) -> None:
    counters = Counters("m", {"0": {f"octavo:cores_{metric}": 1.0}, "1": {}}, 1.0)
    found = loads(counters, counters)
    assert line(found[0]).endswith(f"; {said}")
    assert line(found[1]).endswith("0 preemptions")
    assert f"\n  {said}\n" in frame("http://here", "m", found, deque([1.0]), [])
