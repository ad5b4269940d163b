"""API keys: who may ask, who asked, and what a right opens."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest

from octavo.core.outputs import RequestError
from octavo.server.endpoints import ENDPOINTS
from tests.server.conftest import Served
from tests.server.raw import Answer, ask

Start = Callable[..., Served]
COMPLETION = {"prompt": "a", "max_tokens": 1}
KEYS = """
- {name: alice, key: alice-secret}
- {name: bob, key: bob-secret, rights: [cache]}
- {name: grafana, key: grafana-secret, rights: [observe]}
"""


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


@pytest.fixture
def guarded(start_server: Start, tmp_path: Path) -> Served:
    """A server with keys of three names, each with other rights, and one with all rights."""
    (tmp_path / "keys.yaml").write_text(KEYS)
    return start_server(api_key_file=str(tmp_path / "keys.yaml"), admin_api_key=("root-secret",))


def test_key_is_needed_but_for_what_tells_nothing(start_server: Start) -> None:
    server = start_server(api_key=("first", "second"))
    for path in ("/health", "/version", "/", "/openapi.json"):
        assert ask(server.url, path).status == 200, path
    for path in ("/v1/models", "/v1/nothing", "/tokenize", "/metrics", "/metrics%0a", "/health%0a"):
        answer = ask(server.url, path)
        assert (answer.status, answer.headers["www-authenticate"]) == (401, "Bearer"), path
        assert (answer.error["code"], answer.headers["x-should-retry"]) == ("invalid_api_key", "false")
    for wrong in ("Bearer", "Bearer third", "Basic first", "first", "Bearer first,second", "Bearer \xff"):
        assert ask(server.url, "/v1/models", headers={"Authorization": wrong}).status == 401, wrong
    for right in ("Bearer first", "bearer second"):
        assert ask(server.url, "/v1/models", headers={"Authorization": right}).status == 200, right


def test_tenant_is_the_keys_name_where_there_are_keys_and_else_the_user(server: Served, guarded: Served) -> None:
    for key, user in (("alice-secret", "a"), ("alice-secret", "b"), ("bob-secret", "a")):
        answer = ask(guarded.url, "/v1/completions", {**COMPLETION, "user": user}, headers=bearer(key))
        assert answer.status == 200
    assert [options["tenant"] for *_, options in guarded.llm.requests] == ["alice", "alice", "bob"]
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
    assert ask(server.url, "/v1/chat/completions", {**body, "user": "alice"}).status == 200
    assert ask(server.url, "/v1/chat/completions", body).status == 200
    assert [options["tenant"] for *_, options in server.llm.requests] == ["alice", None]


def test_every_prompt_is_in_the_namespace_of_its_key(server: Served, guarded: Served) -> None:
    bodies: dict[str, dict[str, Any]] = {
        "/v1/completions": {"prompt": ["a", "b"]},
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
        "/pin_prefix": {"prompt": "abc", "ttl_s": 60},
    }
    for path, body in bodies.items():
        for key in ("bob-secret", "root-secret"):
            assert ask(guarded.url, path, body, headers=bearer(key)).status == 200
        assert ask(server.url, path, body).status == 200

    def namespaces(served: Served) -> list[str | None]:
        prompts = [prompt for _, prompt, *_ in served.llm.requests] + [prompt for prompt, *_ in served.llm.pinned]
        return [prompt.cache_namespace for prompt in prompts]

    bob, root = namespaces(guarded)[0], namespaces(guarded)[-1]
    assert namespaces(guarded) == [bob, bob, root, root, bob, root, bob, root]
    assert bob != root
    assert None not in (bob, root)
    assert set(namespaces(server)) == {None}


_FIXED = dict.fromkeys(
    (
        *("/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/sleep", "/wake_up"),
        *("/update_weights_from_disk", "/update_weights"),
    ),
    403,
)
"""The server of these tests loads no adapters while it runs and does not sleep, whoever asks for it."""


@pytest.mark.parametrize("method", ["GET", "HEAD", "POST"])
def test_what_needs_a_right_is_closed_to_keys_without_it(guarded: Served, method: str) -> None:
    keys = {"alice-secret": set(), "bob-secret": {"cache"}, "grafana-secret": {"observe"}}
    for endpoint in ENDPOINTS:
        if endpoint.right is None or (method == "POST") != (endpoint.method == "POST"):
            continue
        for key, rights in (keys | {"root-secret": {"cache", "observe", "operate", "kv-events"}}).items():
            body: dict[str, dict[str, Any]] = {"/pin_prefix": {"prompt": "abc", "ttl_s": 60}, "/drain": {"replica": 0}}
            body |= {"/update_weights_from_disk": {"model_path": "other"}, "/update_weights": {"weight_dir": "other"}}
            body |= {"/update_weight_version": {"new_version": "1"}, "/finish_weight_update": {}}
            body |= {"/abort_requests": {}, "/inference/v1/abort_requests": {}, "/start_profile": {}}
            asked = body.get(endpoint.path, {"prompt": "abc"}) if endpoint.request is not None else None
            answer = ask(guarded.url, endpoint.path, asked, method=method, headers=bearer(key))
            # KV events and profiles are not enabled, and the engine of these tests makes no reports
            other = dict.fromkeys(("/kv/events", "/start_profile", "/stop_profile"), 404) | _FIXED
            other["/live"] = 503 if method == "GET" else 200
            may = other.get(endpoint.path, 200)
            assert answer.status == (may if endpoint.right in rights else 403), (endpoint.path, key)
            if answer.status == 403 and endpoint.right not in rights and method != "HEAD":
                assert (answer.error["type"], answer.error["code"]) == ("permission_error", "missing_right")
                assert f"needs the right {endpoint.right}" in answer.error["message"]
                assert "secret" not in answer.error["message"]


def test_metrics_are_open_where_the_server_says_so(start_server: Start) -> None:
    server = start_server(api_key=("k",), public_metrics=True)
    for headers in ({}, bearer("k"), bearer("wrong")):
        assert ask(server.url, "/metrics", headers=headers).status == 200
    assert ask(server.url, "/reset_prefix_cache", method="POST", headers=bearer("k")).status == 403


def test_the_openapi_document_and_the_front_page_tell_the_rights(server: Served) -> None:
    paths = ask(server.url, "/openapi.json").json["paths"]
    assert paths["/pin_prefix"]["post"]["security"] == [{"key": ["cache"]}]
    assert paths["/metrics"]["get"]["security"] == [{"key": ["observe"]}]
    assert paths["/v1/completions"]["post"]["security"] == [{"key": []}]
    assert paths["/health"]["get"]["security"] == []
    assert "the right observe" in paths["/scheduler/decisions"]["get"]["summary"]
    assert "the right cache" in ask(server.url, "/").json["endpoints"]["POST /reset_prefix_cache"]


@pytest.mark.parametrize("stream", [False, True])
def test_refusals_tell_of_others_only_with_the_right(guarded: Served, stream: bool) -> None:
    guarded.llm.error = RequestError(
        "7 requests are waiting", code="queue_full", retry_after_s=19, public_message="the queue is full"
    )
    guarded.llm.error_after = 0

    def refused(key: str) -> Answer:
        return ask(guarded.url, "/v1/completions", {**COMPLETION, "stream": stream}, headers=bearer(key))

    for key, message, retry_after in (
        ("alice-secret", "the queue is full", "32"),
        ("bob-secret", "the queue is full", "32"),
        ("grafana-secret", "7 requests are waiting", "19"),
    ):
        answer = refused(key)
        assert (answer.status, answer.error["message"], answer.headers["retry-after"]) == (429, message, retry_after)


def test_last_words_of_the_engine_are_for_those_who_see_all_requests(guarded: Served) -> None:
    guarded.llm.hold_after = 1
    with openai.OpenAI(base_url=f"{guarded.url}/v1", api_key="none", max_retries=0) as client:
        streams = [
            client.with_options(api_key=key).completions.create(model="letters", prompt="a", max_tokens=9, stream=True)
            for key in ("alice-secret", "grafana-secret")
        ]
        for stream in streams:
            next(stream)
        guarded.on_loop(guarded.llm.die, "request cmpl-of-bob failed")
        for stream, words in zip(streams, ("", ": request cmpl-of-bob failed"), strict=True):
            with pytest.raises(openai.APIError) as caught:
                list(stream)
            assert str(caught.value) == f"the engine has stopped{words}"


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
    assert ask(server.url, "/v1/models", headers=bearer("k")).status == 200
