"""The table of limits: what it refuses, and that its checks measure free-form JSON whole."""

from __future__ import annotations

from typing import Any

import pytest

from octavo.core.request_limits import MAX_DEPTH, REQUEST_LIMITS, check_field
from octavo.errors import InvalidRequest


def nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth - 1):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("stop", "x" * 257, "stop has 257 characters, must have at most 256"),
        ("stop", ["a", "x" * 257], "stop[1] has 257 characters"),
        ("stop", ["x" * 200] * 64, "stop has 12,800 characters together, must have at most 4,096"),
        ("bad_words", ["x"] * 65, "bad_words has 65 entries, must have at most 64"),
        ("allowed_token_ids", [1] * 16_385, "16,385 entries"),
        ("logit_bias", dict.fromkeys(range(1025), 0.0), "1,025 entries"),
        ("cache_salt", "x" * 1025, "1,025 characters"),
        ("chat_template_kwargs", {"a": [0] * 2000}, "must have at most 1,024"),
        ("chat_template_kwargs", {"a": ["x" * 40_000, "y" * 40_000]}, "80,001 characters together"),
        ("chat_template_kwargs", {"a": nested(MAX_DEPTH)}, "more than 16 deep"),
        ("metadata", {"x" * 513: "a"}, "513 characters"),
        ("metadata", {str(number): 1 for number in range(17)}, "17 entries"),
    ],
)
def test_what_is_too_long_is_refused_by_name_number_and_limit(name: str, value: Any, words: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        check_field(name, value)
    assert words in str(caught.value)
    assert str(caught.value.field).startswith(name)


def test_the_largest_allowed_value_passes() -> None:
    for name, limits in REQUEST_LIMITS.items():
        if limits.values is not None:
            check_field(name, {"a": nested(MAX_DEPTH - 1)})
        elif limits.chars is not None:
            check_field(name, "x" * min(limits.chars, limits.total_chars or limits.chars))
        elif limits.entries is not None:
            check_field(name, [0] * limits.entries)


def test_the_name_that_the_caller_uses_is_the_one_in_the_error() -> None:
    with pytest.raises(InvalidRequest, match=r"^messages\[3\].name has 300 characters") as caught:
        check_field("messages[].name", "x" * 300, "messages[3].name")
    assert caught.value.field == "messages[3].name"
