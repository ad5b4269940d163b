"""`/tokenize`, `/detokenize`, `/pin_prefix`, `/unpin_prefix` and `/reset_prefix_cache`."""

from __future__ import annotations

from typing import Any

import pytest

from octavo.core.prompt import Prompt
from tests.server.conftest import Served
from tests.server.raw import Answer, ask


def test_text_becomes_the_ids_that_a_completion_would_see(server: Served) -> None:
    answer = ask(server.url, "/tokenize", {"prompt": "ab", "return_token_strs": True})
    assert answer.json == {"count": 3, "max_model_len": 256, "tokens": [0, 97, 98], "token_strs": ["<s>", "a", "b"]}
    assert ask(server.url, "/tokenize", {"prompt": "ab", "add_special_tokens": False}).json["tokens"] == [97, 98]


def test_conversation_becomes_the_ids_that_a_chat_would_see(server: Served) -> None:
    answer = ask(server.url, "/tokenize", {"messages": [{"role": "user", "content": "a"}]}).json
    assert answer["tokens"] == [ord(letter) for letter in "user: a\nassistant: "]
    assert answer["token_strs"] is None


def test_tools_are_part_of_a_conversation_and_of_nothing_else(server: Served) -> None:
    tools = [{"type": "function", "function": {"name": "look", "description": "Looks.", "parameters": {}}}]
    asked = {"messages": [{"role": "user", "content": "a"}], "tools": tools}
    tokens = ask(server.url, "/tokenize", asked).json["tokens"]
    assert '"name":"look"' in ask(server.url, "/detokenize", {"tokens": tokens}).json["prompt"]
    assert ask(server.url, "/tokenize", {"prompt": "a", "tools": tools}).error["param"] == "tools"
    assert ask(server.url, "/tokenize", {**asked, "media_io_kwargs": {"a": {}}}).error["param"] == "media_io_kwargs"


def test_ids_become_text(server: Served) -> None:
    assert ask(server.url, "/detokenize", {"tokens": [0, 97, 98]}).json == {"prompt": "<s>ab"}
    assert ask(server.url, "/detokenize", {"tokens": [0, 97], "skip_special_tokens": True}).json == {"prompt": "a"}


def test_bad_input_is_refused_by_name(server: Served) -> None:
    assert ask(server.url, "/detokenize", {"tokens": [1, 1000]}).error["param"] == "tokens[1]"
    assert ask(server.url, "/tokenize", {}).error["param"] == "prompt"
    assert ask(server.url, "/tokenize", {"prompt": "a", "model": "x"}).status == 404


MESSAGES = [{"role": "system", "content": "Be brief."}]


def pin(server: Served, **fields: Any) -> Answer:
    return ask(server.url, "/pin_prefix", {"ttl_s": 60, **fields})


def test_a_text_is_pinned_for_a_time(server: Served) -> None:
    answer = pin(server, prompt="abcd", cache_salt="s")
    assert answer.json == {"pinned_tokens": 4, "cached_tokens": 2, "because": "all but the last"}
    assert server.llm.pinned == [(Prompt(text="abcd"), 60.0, "s")]


def test_token_ids_are_pinned(server: Served) -> None:
    assert pin(server, prompt=[5, 6, 7], ttl_s=0.5).json["pinned_tokens"] == 2
    assert server.llm.pinned == [(Prompt(token_ids=[5, 6, 7]), 0.5, None)]


def test_messages_are_pinned_without_a_turn_of_the_model(server: Served) -> None:
    assert pin(server, messages=MESSAGES).status == 200
    assert server.llm.pinned[0][0].text == "system: Be brief.\n"
    pin(server, messages=MESSAGES, add_generation_prompt=True)
    assert server.llm.pinned[1][0].text == "system: Be brief.\nassistant: "


def test_a_pin_is_ended_by_the_same_words(server: Served) -> None:
    pin(server, prompt="abcd", cache_salt="s")
    assert ask(server.url, "/unpin_prefix", {"prompt": "abcd"}).json == {"unpinned": False}
    assert ask(server.url, "/unpin_prefix", {"prompt": "abcd", "cache_salt": "s"}).json == {"unpinned": True}
    assert ask(server.url, "/unpin_prefix", {"prompt": "abcd", "cache_salt": "s"}).json == {"unpinned": False}


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({}, "prompt", "invalid_value"),
        ({"prompt": "a", "messages": MESSAGES}, "prompt", "invalid_value"),
        ({"prompt": "a", "ttl_s": 0}, "ttl_s", "invalid_value"),
        ({"prompt": "a", "ttl_s": "long"}, "ttl_s", "invalid_type"),
        ({"prompt": "a", "ttl_s": None}, "ttl_s", "invalid_type"),
        ({"prompt": ["a"]}, "prompt[0]", "invalid_type"),
        ({"prompt": [1000]}, "prompt", "invalid_value"),
        ({"prompt": ""}, "prompt", "empty_prompt"),
        ({"prompt": "a", "ttl": 5}, "ttl", "unknown_parameter"),
        ({"prompt": "a", "cache_salt": 5}, "cache_salt", "invalid_type"),
        ({"messages": []}, "messages", "invalid_value"),
        ({"messages": MESSAGES, "chat_template": "x"}, "chat_template", "unsupported_parameter"),
    ],
)
def test_a_bad_prefix_is_refused_by_name(server: Served, fields: dict[str, Any], param: str, code: str) -> None:
    answer = pin(server, **fields)
    assert (answer.status, answer.error["param"], answer.error["code"]) == (400, param, code)
    assert not server.llm.pinned


def test_another_model_is_not_found(server: Served) -> None:
    assert pin(server, prompt="a", model="other").status == 404
    assert ask(server.url, "/unpin_prefix", {"prompt": "a", "model": "other"}).status == 404


def test_a_reset_needs_no_body_and_says_when_it_is_too_early(server: Served) -> None:
    assert ask(server.url, "/reset_prefix_cache", method="POST").json == {"reset": True, "success": True}
    server.llm.is_busy = True
    answer = ask(server.url, "/reset_prefix_cache", method="POST")
    assert (answer.status, answer.error["code"]) == (409, "requests_running")
    assert "reset_running_requests" in answer.error["message"]
    path = "/reset_prefix_cache?reset_running_requests="
    assert ask(server.url, f"{path}true", method="POST").json == {"reset": True, "success": True}
    assert ask(server.url, f"{path}false", method="POST").status == 409
    assert ask(server.url, f"{path}now", method="POST").error["param"] == "reset_running_requests"


def test_a_key_is_wanted(start_server: Any) -> None:
    url = start_server(api_key=["other"], admin_api_key=["secret"]).url
    for path in ("/pin_prefix", "/unpin_prefix", "/reset_prefix_cache"):
        assert ask(url, path, {"prompt": "a", "ttl_s": 1}).status == 401
    for key, status in (("other", 403), ("secret", 200)):
        headers = {"Authorization": f"Bearer {key}"}
        assert ask(url, "/reset_prefix_cache", method="POST", headers=headers).status == status
