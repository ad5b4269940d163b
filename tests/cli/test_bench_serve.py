"""`octavo bench serve`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from octavo.cli.bench_figures import Answer, figures
from octavo.cli.bench_serve import ServeOptions, make_load
from octavo.cli.main import EXIT_ERROR, main
from octavo.errors import ConfigError
from tests.cli.conftest import Command
from tests.fakes.openai_server import FakeOpenAI, chat, completion, serve_openai


def test_a_load_is_measured_and_reported_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "key").write_text("secret\n")
    fake = FakeOpenAI(lambda body: completion(*"abcd"))
    with serve_openai(fake):
        words = ["bench", "serve", "--port", str(fake.port), "--num-prompts", "5", "--random-input-len", "3"]
        words += ["--api-key-file", str(tmp_path / "key"), "--random-output-len", "4", "--ignore-eos"]
        words += ["--goodput", "ttft:0", "--save-result", "--save-detailed", "--result-filename", str(tmp_path / "out")]
        assert main(words) == 0
    captured = capsys.readouterr()
    result = json.loads(captured.out)
    assert (result["completed"], result["failed"], result["model_id"]) == (5, 0, "fake")
    assert (result["total_input_tokens"], result["total_output_tokens"]) == (35, 20)
    assert result["request_goodput"] == 0.0
    assert result["p99_e2el_ms"] >= result["median_e2el_ms"] >= result["median_ttft_ms"] > 0
    assert len(fake.requests) == 6  # and a warm-up
    assert all(len(each["prompt"]) == 3 and each["ignore_eos"] and each["max_tokens"] == 4 for each in fake.requests)
    assert set(fake.keys) == {"Bearer secret"}
    assert "time to first token" in captured.err
    saved = json.loads((tmp_path / "out").read_text())
    assert [len(gaps) for gaps in saved["itl"]] == [3] * 5


def test_chat_gets_messages_and_a_failure_is_counted(capsys: pytest.CaptureFixture[str]) -> None:
    fake = FakeOpenAI(lambda body: [500] if len(fake.requests) == 3 else chat("a", "b"))
    with serve_openai(fake):
        words = ["bench", "serve", "--base-url", f"http://127.0.0.1:{fake.port}/v1", "--backend", "openai-chat"]
        assert main([*words, "--num-prompts", "3", "--random-input-len", "5", "--max-concurrency", "1"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["completed"], result["failed"], result["total_output_tokens"]) == (2, 1, 4)
    assert len(fake.requests[0]["messages"][0]["content"].split()) == 5


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--goodput", "itl:3"], "goodput has 'itl:3', expected ttft, tpot or e2el"),
        (["--metric-percentiles", "101"], "metric_percentiles is '101'"),
        (["--percentile-metrics", "ttft,x"], "percentile_metrics has 'x'"),
        (["--request-rate", "0"], "request_rate is '0'"),
        (["--dataset-name", "custom"], "dataset_path is not set"),
        (["--extra-body", "[]"], "extra_body is '[]'"),
        (["--base-url", "ftp://here"], "url is 'ftp://here'"),
        (["--header", "a=b\nc: d"], "a header has a line break"),
        (
            ["--port", "9"],
            "http://127.0.0.1:9 cannot be reached: Connection refused; start a server there with octavo serve",
        ),
        (["--base-url", "http://no.such.host.invalid"], "http://no.such.host.invalid cannot be reached: "),
    ],
)
def test_what_is_wrong_is_said_in_one_line(words: list[str], message: str, command: Command) -> None:
    assert message in command("bench", "serve", *words, code=EXIT_ERROR).err


def test_a_name_with_several_addresses_that_nothing_listens_at_has_one_reason(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tries = "[Errno 111] Connect call failed ('::1', 9, 0, 0), [Errno 111] Connect call failed ('127.0.0.1', 9)"

    async def refuse(*_: Any, **__: Any) -> None:
        raise OSError(f"Multiple exceptions: {tries}")

    monkeypatch.setattr("asyncio.open_connection", refuse)
    assert main(["bench", "serve", "--base-url", "http://localhost:9"]) == EXIT_ERROR
    assert (
        "http://localhost:9 cannot be reached: Connection refused; start a server there with octavo serve"
        in capsys.readouterr().err
    )


def options(**values: Any) -> ServeOptions:
    return ServeOptions(**{"num_prompts": 50, **values})


def test_arrivals_have_the_rate_and_depend_on_the_seed_alone() -> None:
    load = make_load(options(request_rate="5", burstiness=0.5))
    assert [each.at_s for each in load] == sorted(each.at_s for each in load)
    assert load[-1].at_s == pytest.approx(10.0)
    assert load == make_load(options(request_rate="5", burstiness=0.5))
    assert load != make_load(options(request_rate="5", burstiness=0.5, seed=1))


def test_random_lengths_vary_within_their_range_behind_the_same_prefix() -> None:
    load = make_load(options(random_input_len=10, random_range_ratio=0.5, random_prefix_len=4))
    lengths = {len(each.prompt) for each in load}
    assert min(lengths) >= 9
    assert max(lengths) <= 19
    assert len(lengths) > 1
    assert len({tuple(each.prompt[:4]) for each in load}) == 1


def test_files_of_prompts(tmp_path: Path) -> None:
    turns = [{"value": "x" * 40}, {"value": "y" * 80}]
    (tmp_path / "gpt.json").write_text(json.dumps([{"conversations": turns}, {"conversations": turns[:1]}]))
    load = make_load(options(dataset_name="sharegpt", dataset_path=str(tmp_path / "gpt.json"), num_prompts=2))
    assert [(each.prompt, each.output_len) for each in load] == [("x" * 40, 20)] * 2
    (tmp_path / "own.jsonl").write_text('{"prompt": "a"}\n{"prompt": "b", "output_tokens": 3}\n')
    load = make_load(options(dataset_name="custom", dataset_path=str(tmp_path / "own.jsonl"), num_prompts=2))
    assert [(each.prompt, each.output_len) for each in load] == [("a", 256), ("b", 3)]
    with pytest.raises(ConfigError, match="which is no sharegpt file"):
        make_load(options(dataset_name="sharegpt", dataset_path=str(tmp_path / "own.jsonl")))


def test_figures_are_those_of_vllm() -> None:
    one = Answer(prompt_len=5, output_len=3, ttft=0.1, itl=[0.2, 0.4], e2el=0.7)
    single = Answer(prompt_len=5, output_len=1, ttft=0.3, e2el=0.3)
    result = figures([one, single, Answer(error="no")], 2.0, [50.0], {"ttft": 200.0, "tpot": 300.0})
    assert result["mean_tpot_ms"] == pytest.approx(300.0)  # a single token has no time per token
    assert result["mean_itl_ms"] == pytest.approx(300.0)
    assert (result["failed"], result["output_throughput"], result["request_goodput"]) == (1, 2.0, 0.5)
