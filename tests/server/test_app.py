"""Whatever is sent, the answer is a 200, or an error that is the sender's."""

from __future__ import annotations

import asyncio
import json
from typing import Any, cast

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
from tests.server.raw import Answer, ask

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
    async def run(path: str) -> int:
        app = Starlette(routes=[Mount("/llm", build_app(cast(AsyncLLM, FakeAsyncLLM()), ServerArgs()))])
        scope = {"type": "http", "http_version": "1.1", "method": "GET", "path": path, "root_path": ""}
        statuses: list[int] = []

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": b"", "more_body": False}

        async def send(message: Any) -> None:
            statuses.append(message.get("status", 0))

        await app({**scope, "query_string": b"", "headers": [(b"host", b"localhost")]}, receive, send)
        return statuses[0]

    assert [asyncio.run(run(path)) for path in ("/llm/v1/models", "/llm/v1/none", "/v1/models")] == [200, 404, 404]


def test_the_application_answers_its_server_about_its_start_and_end_and_closes_web_sockets() -> None:
    async def run(kind: str, messages: list[str]) -> list[str]:
        sent: list[str] = []

        async def receive() -> dict[str, Any]:
            return {"type": messages.pop(0)}

        async def send(message: Any) -> None:
            sent.append(message["type"])

        await build_app(cast(AsyncLLM, FakeAsyncLLM()), ServerArgs())({"type": kind}, receive, send)
        return sent

    ends = ["lifespan.startup", "lifespan.shutdown"]
    assert asyncio.run(run("lifespan", list(ends))) == [f"{each}.complete" for each in ends]
    assert asyncio.run(run("websocket", [])) == ["websocket.close"]
