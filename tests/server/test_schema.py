"""Requests: every list and text has a limit, and the limits hold when a body is decoded."""

from __future__ import annotations

import json
from typing import Any

import pytest
from msgspec import inspect

from octavo.core.request_limits import REQUEST_LIMITS
from octavo.errors import InvalidRequest
from octavo.server.decode import decode, refused_fields
from octavo.server.endpoints import ENDPOINTS
from octavo.server.schema.chat import ChatCompletionRequest, Message
from octavo.server.schema.completions import CompletionRequest
from octavo.server.schema.tokens import DetokenizeRequest, PrefixRequest, TokenizeRequest

REQUESTS = dict.fromkeys(endpoint.request for endpoint in ENDPOINTS if endpoint.request is not None)
ENDLESS = (inspect.StrType, inspect.ListType, inspect.DictType, inspect.AnyType)


def grows(kind: inspect.Type) -> bool:
    if isinstance(kind, inspect.Metadata):
        return grows(kind.type)
    if isinstance(kind, inspect.UnionType):
        return any(grows(inner) for inner in kind.types)
    return isinstance(kind, ENDLESS)


@pytest.mark.parametrize("kind", [*REQUESTS, Message])
def test_every_field_that_can_grow_has_a_limit(kind: Any) -> None:
    """A field that is refused holds nothing; all others that hold lists or texts stand in the table."""
    info = inspect.type_info(kind)
    assert isinstance(info, inspect.StructType)
    prefix = "messages[]." if kind is Message else ""
    missing = [
        field.name
        for field in info.fields
        if grows(field.type)
        and field.name not in refused_fields(kind)
        and f"{prefix}{field.name}" not in REQUEST_LIMITS
    ]
    assert not missing, "enter them into REQUEST_LIMITS, octavo/core/request_limits.py"


def refusal(kind: Any, **fields: Any) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        decode(json.dumps(fields).encode(), kind)
    return caught.value


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("bad_words", ["x" * 30_000_000]),
        ("stop", ["x" * 257]),
        ("stop_token_ids", [1] * 1025),
        ("allowed_token_ids", [1] * 16_385),
        ("logit_bias", {str(number): 1 for number in range(1025)}),
        ("user", "x" * 257),
        ("cache_salt", "x" * 1025),
        ("model", "x" * 1025),
        ("metadata", {"a": "x" * 513}),
        ("chat_template_kwargs", {"a": [[]] * 1024}),
        ("chat_template", "x" * 65_537),
        ("prompt_cache_key", "x" * 257),
    ],
)
def test_long_values_are_refused_when_the_body_is_decoded(field: str, value: Any) -> None:
    error = refusal(ChatCompletionRequest, messages=[{"role": "user", "content": "a"}], **{field: value})
    assert str(error.field).startswith(field)
    assert len(str(error)) < 300


@pytest.mark.parametrize(
    ("messages", "field"),
    [
        ([{"role": "user", "content": "a"}] * 4097, "messages"),
        ([{"role": "user", "content": "a", "name": "x" * 257}], "messages[0].name"),
        ([{"role": "user", "content": "x" * (1 << 20)}] * 3, "messages"),
        ([{"role": "user", "content": [{"type": "text", "text": "a"}] * 1025}], "messages[0].content"),
        ([{"role": "user", "content": "a", "annotations": [0] * 2000}], "messages[0].annotations"),
    ],
)
@pytest.mark.parametrize("kind", [ChatCompletionRequest, TokenizeRequest, PrefixRequest])
def test_messages_are_limited_wherever_they_are_sent(kind: Any, messages: list[Any], field: str) -> None:
    assert refusal(kind, messages=messages).field == field


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"prompt": ["a"] * 2049}, "2,049 entries"),
        ({"prompt": ["x" * 1_500_000] * 3}, "4,500,000 characters together"),
        ({"prompt": ["a"] * 2000, "n": 3}, "6,000 sequences"),
        ({"prompt": [[1] * 600_000] * 2}, "1,200,000 token ids"),
    ],
)
def test_prompts_are_limited_together(fields: Any, words: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        decode(json.dumps(fields).encode(), CompletionRequest).prompts()
    assert words in str(caught.value)
    assert caught.value.field == "prompt"


def test_ids_to_decode_are_limited() -> None:
    assert refusal(DetokenizeRequest, tokens=[1] * ((1 << 20) + 1)).field == "tokens"
