"""Ids, body limits and origins; whatever is sent, the answer is a 200, or an error that is the sender's."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from email.utils import parsedate_to_datetime
from typing import Any, cast
from urllib.parse import quote

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from starlette.applications import Starlette
from starlette.routing import Mount

from octavo.async_llm import AsyncLLM
from octavo.config.server_args import ServerArgs
from octavo.server.app import build_app
from octavo.server.schema.chat import ChatCompletionRequest
from octavo.server.schema.completions import CompletionRequest
from octavo.server.schema.messages import CountTokensRequest, MessagesRequest
from octavo.server.schema.responses import InputTokensRequest, ResponsesRequest
from octavo.server.schema.tokens import DetokenizeRequest, TokenizeRequest
from tests.server.conftest import Served
from tests.server.fake_llm import FakeAsyncLLM
from tests.server.raw import Answer, ask, connect, eventually

ENDPOINTS = {
    "/v1/completions": CompletionRequest,
    "/v1/chat/completions": ChatCompletionRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
    "/v1/responses": ResponsesRequest,
    "/v1/responses/input_tokens": InputTokensRequest,
    "/v1/messages": MessagesRequest,
    "/v1/messages/count_tokens": CountTokensRequest,
}

scalars = (
    st.none() | st.booleans() | st.integers() | st.integers(-3, 3) | st.floats(allow_nan=False) | st.text(max_size=5)
)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
parts = st.fixed_dictionaries(
    {"type": st.sampled_from(["text", "image_url", "x"])}, optional={"text": st.text(max_size=3)}
)
messages = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "developer", "x"])},
    optional={"content": st.text(max_size=3) | st.lists(parts, max_size=2) | values, "name": values},
)


def bodies(path: str) -> st.SearchStrategy[dict[str, Any]]:
    """Mostly plausible: known fields with values of any kind, and what the endpoint needs."""
    needed: dict[str, st.SearchStrategy[Any]] = {
        "/v1/completions": {"prompt": st.text(max_size=5) | st.lists(st.text(max_size=3), max_size=3) | values},
        "/v1/chat/completions": {"messages": st.lists(messages, max_size=3) | values},
        "/tokenize": {"prompt": st.text(max_size=5) | values},
        "/detokenize": {"tokens": st.lists(st.integers(-1, 1200), max_size=4) | values},
        "/v1/responses": {"input": st.text(max_size=5) | st.lists(messages | values, max_size=3) | values},
        "/v1/responses/input_tokens": {"input": st.text(max_size=5) | st.lists(messages | values, max_size=3) | values},
        "/v1/messages": {"messages": st.lists(messages, max_size=3) | values},
        "/v1/messages/count_tokens": {"messages": st.lists(messages, max_size=3) | values},
    }[path]
    names = st.sampled_from(ENDPOINTS[path].__struct_fields__)
    others = st.dictionaries(names, values, max_size=3)
    few_tokens = st.sampled_from([{}, {"max_tokens": 2}, {"max_tokens": 2, "stream": True}])
    return st.builds(lambda a, b, c: {**c, **b, **a}, st.fixed_dictionaries(needed), others, few_tokens)


def check(answer: Answer) -> None:
    assert answer.status < 500, answer.body
    if answer.status != 200:
        assert answer.json["error"]["message"]


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(data=st.data(), path=st.sampled_from(sorted(ENDPOINTS)))
def test_no_json_makes_the_server_fail(server: Served, data: st.DataObject, path: str) -> None:
    body = data.draw(bodies(path))
    check(
        ask(server.url, path, json.dumps(body, ensure_ascii=data.draw(st.booleans())).encode("utf-8", "surrogatepass"))
    )


@settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(body=st.binary(max_size=40), path=st.sampled_from(sorted(ENDPOINTS)))
def test_no_bytes_make_the_server_fail(server: Served, body: bytes, path: str) -> None:
    answer = ask(server.url, path, body)
    check(answer)
    assert answer.status == 400


def test_the_application_works_below_a_path_of_another_one() -> None:
    async def run(path: str, *headers: tuple[bytes, bytes]) -> int:
        app = Starlette(routes=[Mount("/llm", build_app(cast(AsyncLLM, FakeAsyncLLM()), ServerArgs()))])
        scope = {"type": "http", "http_version": "1.1", "method": "GET", "path": path, "root_path": ""}
        statuses: list[int] = []

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": b"", "more_body": False}

        async def send(message: Any) -> None:
            statuses.append(message.get("status", 0))
            bodies.append(message.get("body", b""))

        await app({**scope, "query_string": b"", "headers": [(b"host", b"localhost"), *headers]}, receive, send)
        return statuses[0]

    bodies: list[bytes] = []

    assert [asyncio.run(run(path)) for path in ("/llm/v1/models", "/llm/v1/none", "/v1/models")] == [200, 404, 404]
    assert asyncio.run(run("/llm/v1/realtime", (b"upgrade", b"websocket"))) == 426
    assert b"octavo's own server" in bodies[-1]


def test_the_application_answers_its_server_about_its_start_and_end_and_closes_web_sockets() -> None:
    async def run(kind: str, messages: list[str], *extensions: str) -> list[str]:
        sent: list[str] = []

        async def receive() -> dict[str, Any]:
            return {"type": messages.pop(0)}

        async def send(message: Any) -> None:
            sent.append(message["type"])
            bodies.append(message.get("body", b""))

        scope = {"type": kind, "extensions": {each: {} for each in extensions}}
        await build_app(cast(AsyncLLM, FakeAsyncLLM()), ServerArgs())(scope, receive, send)
        return sent

    bodies: list[bytes] = []
    ends = ["lifespan.startup", "lifespan.shutdown"]
    assert asyncio.run(run("lifespan", list(ends))) == [f"{each}.complete" for each in ends]
    assert asyncio.run(run("websocket", [])) == ["websocket.close"]
    denial = "websocket.http.response"
    assert asyncio.run(run("websocket", [], denial)) == [f"{denial}.start", f"{denial}.body"]
    assert b"octavo's own server" in bodies[-1]


Start = Callable[..., Served]
COMPLETION = {"prompt": "a", "max_tokens": 1}


def test_usable_request_id_of_the_client_is_kept(server: Served) -> None:
    answer = ask(server.url, "/v1/completions", COMPLETION, headers={"X-Request-Id": "trace-7"})
    assert (answer.headers["x-request-id"], answer.json["id"]) == ("trace-7", "cmpl-trace-7")


@pytest.mark.parametrize("given", ["", "a b", "x" * 129])
def test_other_requests_get_an_id_of_their_own(server: Served, given: str) -> None:
    first, second = (ask(server.url, "/health", headers={"X-Request-Id": given}) for _ in range(2))
    assert given != first.headers["x-request-id"] != second.headers["x-request-id"]


def test_answers_are_dated(server: Served) -> None:
    assert parsedate_to_datetime(ask(server.url, "/health").headers["date"]).year >= 2024


def test_user_is_bounded(server: Served) -> None:
    assert ask(server.url, "/v1/completions", {**COMPLETION, "user": "u" * 256}).status == 200
    error = ask(server.url, "/v1/completions", {**COMPLETION, "user": "u" * 257}).error
    assert (error["param"], error["code"]) == ("user", "invalid_value")
    assert "must have at most 256" in error["message"]


def test_body_over_the_limit_is_refused_announced_or_not(start_server: Start) -> None:
    server = start_server(max_body_size=1000)

    def pieces(num_bytes: int) -> Iterator[bytes]:
        yield from (b"x" * 500 for _ in range(num_bytes // 500))

    for body, chunked in ((b"x" * 1001, False), (b"x" * 1_000_000, False), (pieces(2000), True), (pieces(10**6), True)):
        answer = ask(
            server.url,
            "/v1/completions",
            body,
            chunked=chunked,
            headers={"Transfer-Encoding": "chunked"} if chunked else {},
        )
        assert (answer.status, answer.error["code"]) == (413, "request_body_too_large")
        assert answer.headers["connection"] == "close"
    assert ask(server.url, "/v1/completions", b"x" * 1000).status == 400
    assert ask(server.url, "/v1/messages", b"x" * 1001).json["error"]["type"] == "request_too_large"


def test_bodies_of_all_open_requests_have_one_bound(start_server: Start) -> None:
    size = 200_000
    server = start_server(max_body_size=size, max_bodies_size=5 * size, api_key=("first", "second"))

    def refused(key: str) -> bool:
        answer = ask(server.url, "/v1/completions", b" " * size, headers={"Authorization": f"Bearer {key}"})
        if answer.status == 503:
            assert (answer.error["code"], answer.headers["retry-after"]) == ("too_many_bodies", "1")
        return answer.status == 503

    assert not refused("first")
    with ExitStack() as stack:
        for num_unfinished in range(1, 4):
            connection = stack.enter_context(connect(server.url))
            connection.putrequest("POST", "/v1/completions")
            connection.putheader("Content-Type", "application/json")
            connection.putheader("Authorization", "Bearer first")
            connection.putheader("Content-Length", str(size))
            connection.endheaders(b" " * (size - 1))
            if num_unfinished == 3:
                eventually(lambda: refused("first"))
        assert not refused("second")
        small = ask(server.url, "/v1/completions", COMPLETION, headers={"Authorization": "Bearer first"})
        assert small.status == 200
    eventually(lambda: not refused("first"))


def test_other_origins_are_let_in_only_when_named(server: Served, start_server: Start) -> None:
    headers = {"Origin": "https://a.example", "Access-Control-Request-Method": "POST"}
    assert "access-control-allow-origin" not in ask(server.url, "/v1/models", headers=headers).headers
    open_server = start_server(allowed_origins=("https://a.example",), api_key=("k",))
    preflight = ask(open_server.url, "/v1/completions", method="OPTIONS", headers=headers)
    assert (preflight.status, preflight.headers["access-control-allow-origin"]) == (200, "https://a.example")
    refused = ask(open_server.url, "/v1/models", headers={"Origin": "https://a.example"})
    assert (refused.status, refused.headers["access-control-allow-origin"]) == (401, "https://a.example")
    readable = refused.headers["access-control-expose-headers"].split(", ")
    assert set(readable) == {"X-Request-Id", "Retry-After"}
    other = ask(open_server.url, "/v1/models", headers={"Origin": "https://b.example"})
    assert "access-control-allow-origin" not in other.headers


def test_methods_headers_and_cookies_of_other_origins_are_those_that_were_allowed(start_server: Start) -> None:
    server = start_server(
        allowed_origins='["https://a.example"]',
        allowed_methods=("POST",),
        allowed_headers=("X-Trace",),
        allow_credentials=True,
    )
    asked = {"Origin": "https://a.example", "Access-Control-Request-Method": "POST"}
    for header, status in (("X-Trace", 200), ("X-Other", 400)):
        preflight = ask(
            server.url, "/v1/models", method="OPTIONS", headers={**asked, "Access-Control-Request-Headers": header}
        )
        assert preflight.status == status
    assert preflight.headers["access-control-allow-credentials"] == "true"
    asked["Access-Control-Request-Method"] = "GET"
    assert ask(server.url, "/v1/models", method="OPTIONS", headers=asked).status == 400


def test_requests_are_logged_only_on_demand_and_never_with_prompts_or_keys(
    start_server: Start, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    headers = {"Authorization": "Bearer hush-key", "X-Request-Id": "r-9"}
    body = {"prompt": "hush prompt", "max_tokens": 1}
    quiet, talkative = start_server(api_key=("hush-key",)), start_server(api_key=("hush-key",), log_requests=True)
    ask(quiet.url, "/v1/completions", body, headers=headers)
    assert "/v1/completions" not in caplog.text
    ask(talkative.url, "/v1/completions", body, headers=headers)
    talkative.stop()
    assert "POST /v1/completions 200" in caplog.text
    assert "r-9" in caplog.text
    assert "hush" not in caplog.text


@pytest.mark.parametrize("sent", ["%0a12:00:00.000 server INFO forged", "%1b[2J", "%0d", "\u00e9", "%00", "%e2%80%ae"])
def test_no_request_writes_a_log_line_of_its_own(
    capsys: pytest.CaptureFixture[str], log_to_stderr: None, start_server: Start, sent: str
) -> None:
    server = start_server(log_requests=True)
    ask(server.url, f"/v1/nothing{quote(sent, safe='%')}")
    server.stop()
    lines = [line for line in capsys.readouterr().err.splitlines() if "nothing" in line]
    assert len(lines) == 1
    assert lines[0].isascii()
    assert lines[0].isprintable()


@pytest.mark.parametrize("path", ["/v1/models", "/health", "/v1/models/letters", "/"])
@pytest.mark.parametrize("root", ["/llm", "/v1", "/llm/a"])
def test_proxy_may_strip_the_root_path_or_leave_it(start_server: Start, root: str, path: str) -> None:
    server = start_server(root_path=root, api_key=("k",))
    for sent in (path, root + path):
        assert ask(server.url, sent, headers={"Authorization": "Bearer k"}).status == 200
        assert (ask(server.url, sent).status == 200) == (path in ("/health", "/"))
    assert ask(server.url, root, headers={"Authorization": "Bearer k"}).status == 200 if root != "/v1" else True
    assert ask(server.url, f"{root}x/health", headers={"Authorization": "Bearer k"}).status == 404
