"""API keys: who may ask, and who asked."""

from __future__ import annotations

from collections.abc import Callable

import openai
import pytest

from tests.server.conftest import Served
from tests.server.raw import ask

Start = Callable[..., Served]
COMPLETION = {"prompt": "a", "max_tokens": 1}


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
