"""What a server says of its guesses: usage, metrics, and nothing in the text."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.warm_server import WarmServer
from tests.server.raw import ask

pytestmark = pytest.mark.slow

# steps that take equally long whatever they verify, for a beginning
SPECULATIVE = {"method": "ngram", "num_speculative_tokens": 8, "step_ms": [[1, 1.0], [64, 1.0]]}
STORY = [{"role": "user", "content": "Tell me a story about a dog."}]


@pytest.fixture(scope="module")
def server(serve: Callable[..., WarmServer]) -> Iterator[WarmServer]:
    process = serve(
        Path("octavo-tiny"), "--num-gpu-blocks-override", "256", "--vllm-metrics",
        "--speculative-config", json.dumps(SPECULATIVE),
    )  # fmt: skip
    yield process
    assert process.stop() == 0


def chat(server: WarmServer, **fields: Any) -> tuple[str, dict[str, int]]:
    answer = ask(
        server.url, "/v1/chat/completions", {"messages": STORY, "temperature": 0.0, "max_tokens": 60, **fields}
    )
    assert answer.status == 200, answer.body
    return answer.json["choices"][0]["message"]["content"], answer.json["usage"]["completion_tokens_details"]


def test_a_predicted_output_saves_steps_and_is_counted_in_usage_and_metrics(server: WarmServer) -> None:
    text, details = chat(server)
    assert {"accepted_prediction_tokens", "rejected_prediction_tokens"} <= details.keys()
    predicted, details = chat(server, prediction={"type": "content", "content": text})
    assert predicted == text
    assert details["accepted_prediction_tokens"] > 0
    wrong, details = chat(server, prediction={"type": "content", "content": text[:60] + " never " + text[60:]})
    assert wrong == text
    assert details["rejected_prediction_tokens"] > 0
    metrics = ask(server.url, "/metrics").body.decode()
    counts = {}
    for prefix in ("octavo", "vllm"):
        for name in ("drafts", "draft_tokens", "accepted_tokens"):
            (line,) = (
                each for each in metrics.splitlines() if each.startswith(f"{prefix}:spec_decode_num_{name}_total{{")
            )
            counts[prefix, name] = float(line.split()[-1])
        positions = [
            float(each.split()[-1])
            for each in metrics.splitlines()
            if each.startswith(f"{prefix}:spec_decode_num_accepted_tokens_per_pos_total{{")
        ]
        assert sum(positions) == counts[prefix, "accepted_tokens"] > 0
    assert counts["octavo", "draft_tokens"] == counts["vllm", "draft_tokens"] >= counts["vllm", "accepted_tokens"]


def test_each_choice_and_stream_is_counted(server: WarmServer) -> None:
    text, _ = chat(server)
    _, details = chat(server, n=3, temperature=1.0, seed=1, prediction={"type": "content", "content": text})
    assert details["accepted_prediction_tokens"] >= 0
    fields = {"messages": STORY, "temperature": 0.0, "max_tokens": 60, "stream": True}
    fields |= {"stream_options": {"include_usage": True}, "prediction": {"type": "content", "content": text}}
    lines = ask(server.url, "/v1/chat/completions", fields).body.decode().split("\n\n")
    events = [json.loads(each.removeprefix("data: ")) for each in lines if each.startswith("data: {")]
    streamed = "".join(choice["delta"].get("content") or "" for each in events for choice in each["choices"])
    assert streamed == text
    assert events[-1]["usage"]["completion_tokens_details"]["accepted_prediction_tokens"] > 0


def test_a_long_prediction_is_cut_off_or_refused(server: WarmServer) -> None:
    text, _ = chat(server)
    long, _ = chat(server, prediction={"type": "content", "content": text + " and so on" * 50_000})
    assert long == text
    fields = {"messages": STORY, "prediction": {"type": "content", "content": "a" * (1 << 23)}}
    answer = ask(server.url, "/v1/chat/completions", fields)
    assert answer.status in (400, 413)
    assert chat(server)[0] == text
