"""From bytes to structs: complaints say where and what."""

from __future__ import annotations

from typing import Any

import pytest

from octavo.errors import InvalidRequest
from octavo.server.decode import decode
from octavo.server.schema.chat import ChatCompletionRequest
from octavo.server.schema.completions import CompletionRequest
from tests.server.conftest import Served
from tests.server.raw import ask


def refusal(body: bytes, kind: Any = ChatCompletionRequest) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        decode(body, kind)
    return caught.value


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "the body is empty"),
        (b'{"messages": [', "breaks off (byte 14)"),
        (b'{"user": "abcd",}', "trailing comma in object (byte 16)"),
        (b'{"temperature": NaN}', "invalid character (byte 16)"),
        (b'{"user": "\xff"}', "not UTF-8"),
        (b'{"web_search_options": ' + b"[" * 100_000, "too deeply"),
        (b"[]", "the body: expected `object`, got `array`"),
    ],
)
def test_malformed_json_is_refused_with_its_position(body: bytes, words: str) -> None:
    assert words in str(refusal(body))


@pytest.mark.parametrize(
    ("body", "field", "words"),
    [
        (b'{"message": []}', "message", "message is not a known field; did you mean messages?"),
        (b'{"messages": [{"rol": 1}]}', "messages[0].rol", "did you mean role?"),
        (
            b'{"tools": [{"type": "function", "name": "f"}], "messages": []}',
            "tools[0].name",
            "tools[0].name is not a known field; tools[0] has type, function, custom, cache_control",
        ),
        (b"{}", "messages", "messages is missing"),
        (
            b'{"messages": [{"role": "x"}]}',
            "messages[0].role",
            "'x' is not one of assistant, developer, system, tool, user",
        ),
        (
            b'{"messages": [{"role": "user", "content": [{"type": "x"}]}]}',
            "messages[0].content[0].type",
            "'x' is not one of audio_url, file, image_url, input_audio, prompt_embeds, refusal, text, video_url",
        ),
        (
            b'{"messages": [{"role": "user", "content": [{"type": "text"}]}]}',
            "messages[0].content[0].text",
            "messages[0].content[0].text is missing",
        ),
        (b'{"messages": [{"role": "user", "content": 1}]}', "messages[0].content", "expected `str | array | null`"),
    ],
)
def test_a_wrong_type_is_refused_with_its_path_and_the_expected_type(body: bytes, field: str, words: str) -> None:
    error = refusal(body)
    assert error.field == field
    assert words in str(error)


def test_a_name_that_would_be_refused_too_is_not_suggested() -> None:
    assert str(refusal(b'{"prompt": "a"}')) == "prompt is not a known field"


@pytest.mark.parametrize(
    ("body", "field"),
    [
        (rb'{"messages": [{"role": "user", "content": "a\ud800"}]}', "messages[0].content"),
        (
            rb'{"messages": [{"role": "user", "content": [{"type": "text", "text": "\udfffb"}]}]}',
            "messages[0].content[0].text",
        ),
        (rb'{"stop": ["a", "\ud83d"], "messages": []}', "stop[1]"),
        (rb'{"bad_words": ["\ud83d\ud83d"], "messages": []}', "bad_words[0]"),
        (rb'{"chat_template_kwargs": {"\ud800": 1}, "messages": []}', "chat_template_kwargs"),
    ],
)
def test_lone_surrogates_are_refused_by_the_name_of_their_field(body: bytes, field: str) -> None:
    error = refusal(body)
    assert (error.field, error.code) == (field, "invalid_value")
    assert "lone surrogate" in str(error)


def test_json_that_takes_far_more_memory_than_its_bytes_is_refused_before_it_is_decoded() -> None:
    error = refusal(b'{"vllm_xargs": [' + b"[]," * 600_000 + b"0]}")
    assert (error.field, error.code) == (None, "request_too_large")


def test_enormous_names_are_not_repeated() -> None:
    assert len(str(refusal(b'{"' + b"x" * 1_000_000 + b'": 1}'))) < 1000
    assert len(str(refusal(b'{"messages": [{"role": "' + b"x" * 1_000_000 + b'"}]}'))) < 1000


def test_harmless_means_the_same_value_of_the_same_type() -> None:
    assert decode(b'{"prompt": "a", "use_beam_search": false}', CompletionRequest).prompt == "a"
    assert refusal(b'{"prompt": "a", "use_beam_search": 0}', CompletionRequest).field == "use_beam_search"


def test_body_must_be_declared_as_json(server: Served) -> None:
    answer = ask(server.url, "/v1/completions", {"prompt": "a"}, headers={"Content-Type": ""})
    assert (answer.status, answer.error["code"]) == (415, "invalid_content_type")


def test_json_may_be_declared_with_a_character_set(server: Served) -> None:
    headers = {"Content-Type": "application/json; charset=utf-8"}
    assert ask(server.url, "/v1/completions", {"prompt": "a"}, headers=headers).status == 200
