"""Requests as routers of other engines forward them: what they add changes nothing, and what would is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from octavo.server.decode import refused_fields
from octavo.server.schema.chat import ChatCompletionRequest
from tests.server.conftest import Served
from tests.server.raw import ask

# each line: what a client sent to a router, and what the router sent on to octavo
RECORDED = [json.loads(line) for line in (Path(__file__).parent / "router_requests.jsonl").read_text().splitlines()]
ADDED = ("no_stop_trim", "return_hidden_states", "separate_reasoning", "stream_reasoning", "include_reasoning")
DROPPED = {"cache_salt", "priority", "request_id"}
"""What some routers leave out; clients of these go without it."""


def engine_requests(server: Served, path: str, body: dict[str, Any]) -> list[Any]:
    server.llm.requests.clear()
    answer = ask(server.url, path, body)
    assert answer.status == 200, answer.body
    return [request[1:] for request in server.llm.requests]


@pytest.mark.parametrize("case", RECORDED, ids=[f"{case['router']}-{case['path']}" for case in RECORDED])
def test_the_engine_gets_what_the_client_sent_to_the_router(server: Served, case: dict[str, Any]) -> None:
    dropped = {name for name in DROPPED if name not in case["forwarded"]}
    sent = {name: value for name, value in case["sent"].items() if name not in dropped}
    forwarded = engine_requests(server, case["path"], case["forwarded"])
    assert forwarded == engine_requests(server, case["path"], sent)


def test_every_added_field_is_in_a_recorded_request() -> None:
    assert {name for case in RECORDED for name in case["forwarded"] if name in ADDED} == {*ADDED}
    assert {*refused_fields(ChatCompletionRequest), *ChatCompletionRequest.__struct_fields__} >= {*ADDED}


@pytest.mark.parametrize("field", ["no_stop_trim", "return_hidden_states"])
def test_a_value_that_would_change_the_answer_is_refused_by_name(server: Served, field: str) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], field: True}
    answer = ask(server.url, "/v1/chat/completions", body)
    assert (answer.status, answer.error["param"], answer.error["code"]) == (400, field, "unsupported_parameter")
