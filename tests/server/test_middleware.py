"""Ids, keys, body limits and origins."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from email.utils import parsedate_to_datetime

import openai
import pytest

from tests.server.conftest import Served
from tests.server.raw import ask

Start = Callable[..., Served]
COMPLETION = {"prompt": "a", "max_tokens": 1}


def test_usable_request_id_of_the_client_is_kept(server: Served) -> None:
    answer = ask(server.url, "/v1/completions", COMPLETION, headers={"X-Request-Id": "trace-7"})
    assert answer.headers["x-request-id"] == "trace-7"
    assert answer.json["id"] == "cmpl-trace-7"


@pytest.mark.parametrize("given", ["", "a b", "x" * 129])
def test_other_requests_get_an_id_of_their_own(server: Served, given: str) -> None:
    first, second = (ask(server.url, "/health", headers={"X-Request-Id": given}) for _ in range(2))
    assert given != first.headers["x-request-id"] != second.headers["x-request-id"]


def test_answers_are_dated(server: Served) -> None:
    assert parsedate_to_datetime(ask(server.url, "/health").headers["date"]).year >= 2024


def test_key_is_needed_but_for_what_tells_nothing(start_server: Start) -> None:
    server = start_server(api_key=("first", "second"))
    for path in ("/health", "/metrics", "/version", "/", "/openapi.json"):
        assert ask(server.url, path).status == 200, path
    for path in ("/v1/models", "/v1/nothing", "/tokenize"):
        answer = ask(server.url, path)
        assert (answer.status, answer.headers["www-authenticate"]) == (401, "Bearer"), path
        assert answer.error["code"] == "invalid_api_key"
    for wrong in ("Bearer", "Bearer third", "Basic first", "first", "Bearer first,second", "Bearer \xff"):
        assert ask(server.url, "/v1/models", headers={"Authorization": wrong}).status == 401, wrong
    for right in ("Bearer first", "bearer second"):
        assert ask(server.url, "/v1/models", headers={"Authorization": right}).status == 200, right


def test_tenant_is_the_key_where_there_are_keys_and_else_the_user(server: Served, start_server: Start) -> None:
    guarded = start_server(api_key=("first-secret", "second-secret"))
    for key, user in (("first-secret", "a"), ("first-secret", "b"), ("second-secret", "a")):
        headers = {"Authorization": f"Bearer {key}"}
        assert ask(guarded.url, "/v1/completions", {**COMPLETION, "user": user}, headers=headers).status == 200
    assert [options["tenant"] for *_, options in guarded.llm.requests] == ["key-1", "key-1", "key-2"]
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
    assert ask(server.url, "/v1/chat/completions", {**body, "user": "alice"}).status == 200
    assert ask(server.url, "/v1/chat/completions", body).status == 200
    assert [options["tenant"] for *_, options in server.llm.requests] == ["alice", None]


def test_user_is_bounded(server: Served) -> None:
    assert ask(server.url, "/v1/completions", {**COMPLETION, "user": "u" * 256}).status == 200
    error = ask(server.url, "/v1/completions", {**COMPLETION, "user": "u" * 257}).error
    assert (error["param"], error["code"]) == ("user", "invalid_value")
    assert "length <= 256" in error["message"]


def test_client_sees_a_wrong_key_as_an_authentication_error(start_server: Start) -> None:
    url = f"{start_server(api_key=('right',)).url}/v1"
    with openai.OpenAI(base_url=url, api_key="wrong", max_retries=0) as client:
        with pytest.raises(openai.AuthenticationError):
            client.models.list()
        assert [model.id for model in client.with_options(api_key="right").models.list()] == ["letters", "alias"]


def test_open_paths_are_those_below_the_root_path(start_server: Start) -> None:
    server = start_server(api_key=("k",), root_path="/llm/")
    assert ask(server.url, "/health").status == 200
    assert ask(server.url, "/v1/models").status == 401
    assert ask(server.url, "/v1/models", headers={"Authorization": "Bearer k"}).status == 200


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


def test_other_origins_are_let_in_only_when_named(server: Served, start_server: Start) -> None:
    headers = {"Origin": "https://a.example", "Access-Control-Request-Method": "POST"}
    assert "access-control-allow-origin" not in ask(server.url, "/v1/models", headers=headers).headers
    open_server = start_server(allow_origins=("https://a.example",), api_key=("k",))
    preflight = ask(open_server.url, "/v1/completions", method="OPTIONS", headers=headers)
    assert (preflight.status, preflight.headers["access-control-allow-origin"]) == (200, "https://a.example")
    refused = ask(open_server.url, "/v1/models", headers={"Origin": "https://a.example"})
    assert (refused.status, refused.headers["access-control-allow-origin"]) == (401, "https://a.example")
    readable = refused.headers["access-control-expose-headers"].split(", ")
    assert set(readable) == {"X-Request-Id", "Retry-After"}
    other = ask(open_server.url, "/v1/models", headers={"Origin": "https://b.example"})
    assert "access-control-allow-origin" not in other.headers


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
