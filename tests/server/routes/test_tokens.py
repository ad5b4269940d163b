"""`/tokenize` and `/detokenize`."""

from __future__ import annotations

from tests.server.conftest import Served
from tests.server.raw import ask


def test_text_becomes_the_ids_that_a_completion_would_see(server: Served) -> None:
    answer = ask(server.url, "/tokenize", {"prompt": "ab", "return_token_strs": True})
    assert answer.json == {"count": 3, "max_model_len": 256, "tokens": [0, 97, 98], "token_strs": ["<s>", "a", "b"]}
    assert ask(server.url, "/tokenize", {"prompt": "ab", "add_special_tokens": False}).json["tokens"] == [97, 98]


def test_conversation_becomes_the_ids_that_a_chat_would_see(server: Served) -> None:
    answer = ask(server.url, "/tokenize", {"messages": [{"role": "user", "content": "a"}]}).json
    assert answer["tokens"] == [ord(letter) for letter in "user: a\nassistant: "]
    assert answer["token_strs"] is None


def test_ids_become_text(server: Served) -> None:
    assert ask(server.url, "/detokenize", {"tokens": [0, 97, 98]}).json == {"prompt": "<s>ab"}
    assert ask(server.url, "/detokenize", {"tokens": [0, 97], "skip_special_tokens": True}).json == {"prompt": "a"}


def test_bad_input_is_refused_by_name(server: Served) -> None:
    assert ask(server.url, "/detokenize", {"tokens": [1, 1000]}).error["param"] == "tokens[1]"
    assert ask(server.url, "/tokenize", {}).error["param"] == "prompt"
    assert ask(server.url, "/tokenize", {"prompt": "a", "model": "x"}).status == 404
