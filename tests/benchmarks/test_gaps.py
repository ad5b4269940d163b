"""Gaps between tokens as a client sees them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from typing import Any

import pytest

from benchmarks.gaps import Asked, Server, Streamed, figures, poisson, run, streams
from octavo.errors import EngineDeadError
from tests.fakes.http_server import serving


class Completions(BaseHTTPRequestHandler):
    """Streams as many tokens as are asked for, and a last event without one; refuses prompts of one token."""

    asked: list[dict[str, Any]]

    def do_GET(self) -> None:
        self._begin(200)
        self.wfile.write(json.dumps({"data": [{"id": "some-model"}]}).encode())

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.asked.append(body)
        self._begin(200 if len(body["prompt"]) > 1 else 400)
        for number in range(body["max_tokens"] + 1):
            logprobs = {"tokens": ["a"]} if number < body["max_tokens"] else None
            event = {"choices": [{"text": "", "logprobs": logprobs}]}
            self.wfile.write(b"data: " + json.dumps(event).encode() + b"\n\n")
        self.wfile.write(b"data: [DONE]\n\n")

    def _begin(self, status: int) -> None:
        self.send_response(status)
        self.end_headers()


@pytest.fixture
def server() -> Iterator[Server]:
    Completions.asked = []
    with serving(Completions) as port:
        yield Server("stub", f"http://127.0.0.1:{port}")


def test_every_token_of_every_request_is_an_event(server: Server) -> None:
    found = run(server, [Asked(0.0, 5, 3), Asked(0.01, 7, 1)], seed=0)
    assert [len(each.events_s) for each in found] == [3, 1]
    assert all(each.sent_s <= each.events_s[0] for each in found)
    assert sorted(len(body["prompt"]) for body in Completions.asked) == [5, 7]
    assert {(body["model"], body["stream"], body["ignore_eos"]) for body in Completions.asked} == {
        ("some-model", True, True)
    }


def test_a_request_that_is_refused_ends_the_run(server: Server) -> None:
    with pytest.raises(EngineDeadError, match="stub answered 400"):
        run(server, [Asked(0.0, 5, 3), Asked(0.0, 1, 1)], seed=0)


def test_figures_are_those_of_all_gaps_together() -> None:
    load = [Asked(0.0, 10, 3), Asked(0.0, 10, 3)]
    found = figures(load, [Streamed(0.0, [1.0, 1.5, 2.0]), Streamed(0.5, [1.0, 1.5, 4.0])])
    assert found["gap_median_ms"] == 500
    assert found["gap_worst_ms"] == found["gap_p99_ms"] == 2500
    assert (found["gap_p99_over_median"], found["first_token_mean_ms"]) == (5, 750)
    assert found["output_tokens_per_s"] == 6 / 4


def test_loads_are_the_same_in_every_run() -> None:
    assert poisson(2.0, 9, 100, 20, seed=3) == poisson(2.0, 9, 100, 20, seed=3) != poisson(2.0, 9, 100, 20, seed=4)
    assert [each.input_len for each in streams(1.0)] == [64] * 6 + [1500] * 4
