"""Errors on the wire: always the nested object of the OpenAI API, with the right status and the field that was sent."""

from __future__ import annotations

import re
from typing import Any

import openai
import pytest

from octavo.core.outputs import RequestError
from octavo.errors import (
    ContextTooLong,
    EngineDeadError,
    InvalidRequest,
    RequestFailed,
    RequestTooLarge,
    named_by_the_caller,
)
from octavo.server.errors import as_api_error, ended_with_error
from tests.server.conftest import Served
from tests.server.raw import ask, events

CHAT: Any = {"messages": [{"role": "user", "content": "hi"}]}


@pytest.mark.parametrize(
    ("error", "status", "code", "param"),
    [
        (InvalidRequest("no", field="n"), 400, "invalid_value", "n"),
        (ContextTooLong("long", field="prompt"), 400, "context_length_exceeded", "prompt"),
        (RequestTooLarge("large"), 400, "request_too_large", None),
        (EngineDeadError("gone"), 503, "engine_dead", None),
        (RequestFailed("failed"), 500, "request_failed", None),
    ],
)
def test_each_error_has_its_status(error: Exception, status: int, code: str | None, param: str | None) -> None:
    answer = as_api_error(error)
    assert (answer.status, answer.code, answer.param) == (status, code, param)


def test_unexpected_error_is_logged_and_its_details_are_kept_from_the_client(caplog: pytest.LogCaptureFixture) -> None:
    answer = as_api_error(ZeroDivisionError("secret"))
    assert answer.status == 500
    assert "secret" not in str(answer)
    assert "secret" in caplog.text


def test_error_of_a_request_is_the_clients_or_ours() -> None:
    mine = ended_with_error(RequestError("bad", field="stop", code="c", is_client_error=True))
    assert (mine.status, mine.param, mine.code) == (400, "stop", "c")
    assert (broken := ended_with_error(RequestError("broken"))).status == 500
    fatal = ended_with_error(RequestError("fatal", code="request_quarantined"))
    assert (fatal.status, fatal.headers, broken.headers) == (500, {"x-should-retry": "false"}, {})


def test_queue_that_is_full_says_when_to_come_back(server: Served) -> None:
    server.llm.error, server.llm.error_after = RequestError("full", code="queue_full", retry_after_s=7), 0
    answer = ask(server.url, "/v1/completions", {"prompt": ["a", "b", "c"], "stream": True})
    assert (answer.status, answer.headers["retry-after"], answer.error["code"]) == (429, "7", "queue_full")
    late = ended_with_error(RequestError("late", code="deadline_unreachable", retry_after_s=1))
    assert (late.status, late.headers) == (503, {"Retry-After": "1"})
    gone = ended_with_error(RequestError("gone", code="engine_restarting", retry_after_s=5), shows_others=True)
    assert (gone.status, gone.headers) == (503, {"Retry-After": "5"})


def test_unknown_path_and_method_are_refused(server: Served) -> None:
    answer = ask(server.url, "/v1/nothing", {})
    assert (answer.status, answer.error["code"]) == (404, "unknown_url")
    assert "POST /v1/nothing" in answer.error["message"]
    answer = ask(server.url, "/v1/completions")
    assert (answer.status, answer.error["code"], answer.headers["allow"]) == (405, "method_not_allowed", "POST")


def test_unknown_path_is_answered_with_the_nearest_whatever_the_content_type(server: Served) -> None:
    form = {"Content-Type": "application/x-www-form-urlencoded"}  # of `curl -d` without a header
    for path in ("/chat/completions", "/v1/chat/completion", "/v1/v1/chat/completions"):
        answer = ask(server.url, path, {}, headers=form)
        assert (answer.status, answer.error["code"]) == (404, "unknown_url")
        assert answer.error["message"].startswith(f"there is no POST {path}; GET / lists the endpoints")
        assert answer.error["message"].endswith("; did you mean /v1/chat/completions?")
    assert ask(server.url, "/v1/models", {}, headers=form).status == 405


def test_bug_is_answered_with_500_and_the_request_id(server: Served, caplog: pytest.LogCaptureFixture) -> None:
    server.llm.error, server.llm.error_after = ZeroDivisionError("secret"), 0
    answer = ask(server.url, "/v1/chat/completions", CHAT, headers={"X-Request-Id": "r-1"})
    assert (answer.status, answer.error["type"], answer.headers["x-request-id"]) == (500, "server_error", "r-1")
    assert b"secret" not in answer.body
    assert "request r-1 failed: ZeroDivisionError: secret" in caplog.text


def test_request_that_fails_on_its_way_gets_its_error(client: openai.OpenAI, server: Served) -> None:
    server.llm.error, server.llm.error_after = RequestError("NaN in the logits"), 3
    with pytest.raises(openai.InternalServerError, match="NaN in the logits"):
        client.completions.create(model="letters", prompt="a")


def test_error_in_a_stream_is_its_last_event(client: openai.OpenAI, server: Served) -> None:
    server.llm.error, server.llm.error_after = RequestError("NaN in the logits", code="nan"), 2
    *chunks, last = events(ask(server.url, "/v1/chat/completions", {**CHAT, "stream": True}).body)
    assert [chunk["choices"][0]["delta"].get("content") for chunk in chunks] == ["", "B", "l"]
    assert last == {"error": {"message": "NaN in the logits", "type": "server_error", "param": None, "code": "nan"}}
    with pytest.raises(openai.APIError, match="NaN in the logits"):
        list(client.completions.create(model="letters", prompt="a", stream=True))


def test_an_error_names_the_field_that_was_sent_wherever_its_message_does() -> None:
    names = {"max_tokens": "max_completion_tokens", "prompt": "messages"}
    with pytest.raises(ContextTooLong) as caught, named_by_the_caller(names):
        raise ContextTooLong("the prompt and max_tokens of 9 do not fit; set max_tokens to 5", field="max_tokens")
    assert caught.value.field == "max_completion_tokens"
    assert str(caught.value) == ("the prompt and max_completion_tokens of 9 do not fit; set max_completion_tokens to 5")


@pytest.mark.parametrize(
    ("path", "fields", "param", "message"),
    [
        ("/v1/completions", {"guided_regex": "a", "ignore_eos": True}, "ignore_eos", "a text with guided_regex"),
        (
            "/v1/chat/completions",
            {"guided_choice": ["a"], "ignore_eos": True},
            "ignore_eos",
            "a text with guided_choice",
        ),
        ("/v1/chat/completions", {"logprobs": True, "top_logprobs": -2}, "top_logprobs", "^top_logprobs is"),
        (
            "/v1/responses",
            {"min_tokens": 5, "max_output_tokens": 3},
            "min_tokens",
            "max_output_tokens, which is 3; raise",
        ),
        ("/inference/v1/generate", {"sampling_params": {"n": 0}}, "sampling_params.n", "^sampling_params.n is 0"),
    ],
)
def test_a_refusal_has_the_words_of_its_request(
    server: Served, path: str, fields: dict[str, Any], param: str, message: str
) -> None:
    text = {
        "/v1/completions": {"prompt": "a"},
        "/v1/responses": {"input": "a"},
        "/inference/v1/generate": {"token_ids": [1]},
    }
    refused = ask(server.url, path, {**text.get(path, CHAT), **fields})
    error = refused.json["error"]
    assert (refused.status, error["param"]) == (400, param)
    assert re.search(message, error["message"])
