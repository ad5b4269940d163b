"""`/v1/chat/completions/batch`: several conversations in one request."""

from __future__ import annotations

import json
from typing import Any

import pytest

from octavo.core.prompt import Prompt
from octavo.core.request_limits import REQUEST_LIMITS
from tests.server.conftest import Served
from tests.server.raw import Answer, ask, connect, eventually

CHATS: Any = [
    [{"role": "user", "content": "hi"}],
    [{"role": "system", "content": "Be short."}, {"role": "user", "content": "hello"}],
    [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "I am"}],
]
PATH = "/v1/chat/completions/batch"


def batch(server: Served, messages: Any = CHATS, **fields: Any) -> Answer:
    return ask(server.url, PATH, {"messages": messages, **fields})


def prompts(server: Served) -> list[str | None]:
    return [Prompt.read(prompt).text for _, prompt, *_ in server.llm.requests]


@pytest.mark.parametrize("fields", [{}, {"logprobs": True, "top_logprobs": 2}, {"return_token_ids": True}])
def test_each_conversation_has_the_choice_that_it_has_alone(server: Served, fields: Any) -> None:
    together = batch(server, max_tokens=4, **fields).json
    sent = prompts(server)
    alone = [
        ask(server.url, "/v1/chat/completions", {"messages": messages, "max_tokens": 4, **fields}).json
        for messages in CHATS
    ]
    assert sent == prompts(server)[len(CHATS) :]
    assert together["object"] == "chat.completion"
    assert [{**choice, "index": 0} for choice in together["choices"]] == [each["choices"][0] for each in alone]
    assert [choice["index"] for choice in together["choices"]] == [0, 1, 2]
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert together["usage"][name] == sum(each["usage"][name] for each in alone)


def test_each_answer_repeats_the_turn_that_its_conversation_has_begun(server: Served) -> None:
    fields = {"echo": True, "continue_final_message": True, "max_tokens": 2}
    assert [each["message"]["content"] for each in batch(server, **fields).json["choices"]] == ["Bl", "Bl", "I amBl"]


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"stream": True}, "stream", "unsupported_parameter"),
        ({"n": 2}, "n", "unsupported_parameter"),
        ({"best_of": 2}, "best_of", "unsupported_parameter"),
        ({"use_beam_search": True}, "use_beam_search", "unsupported_parameter"),
        ({"prompt_logprobs": 1}, "prompt_logprobs", "unsupported_parameter"),
        ({"prompt_logprobs": 0}, "prompt_logprobs", "unsupported_parameter"),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}]},
            *("tools", "unsupported_parameter"),
        ),
        ({"messages": []}, "messages", "invalid_value"),
        ({"messages": [CHATS[0], []]}, "messages[1]", "invalid_value"),
        ({"messages": CHATS[0]}, "messages[0]", "invalid_type"),
        ({"messages": [CHATS[0], [{"role": "user"}]]}, "messages[1][0].content", "missing_required_parameter"),
        ({"messages": [CHATS[0]] * (REQUEST_LIMITS["prompt"].entries or 0) + [CHATS[0]]}, "messages", "invalid_value"),
        ({"messages": [CHATS[0], [{"role": "user", "content": "x", "name": "y" * 300}]]}, "messages[1][0].name", None),
        ({"model": "other"}, "model", "model_not_found"),
    ],
)
def test_refusal_names_the_field(server: Served, fields: Any, param: str, code: str | None) -> None:
    error = batch(server, **{"messages": CHATS, **fields}).error
    assert error["param"] == param
    assert code is None or error["code"] == code
    assert not server.llm.requests


def test_one_conversation_that_is_too_long_refuses_all(server: Served) -> None:
    long = [{"role": "user", "content": "x" * 300}]
    error = batch(server, [CHATS[0], long]).error
    assert (error["code"], error["param"]) == ("context_length_exceeded", "max_tokens")
    assert error["message"].startswith("messages[1]: ")


def test_all_conversations_end_when_the_client_goes_away(server: Served) -> None:
    server.llm.hold_after = 2
    body = json.dumps({"messages": CHATS[:2]})
    with connect(server.url) as connection:
        connection.request("POST", PATH, body, {"Content-Type": "application/json"})
        eventually(lambda: len(server.llm.requests) == 2)
        assert not server.llm.aborted
    eventually(lambda: len(server.llm.aborted) == 2)
