"""Adapters as requests name them."""

from __future__ import annotations

from typing import Any

import pytest

from octavo.core.adapter import LoRARequest
from octavo.errors import InvalidRequest


def test_the_key_changes_with_the_name_and_with_the_content() -> None:
    keys = {LoRARequest(name, 1, "/a", digest).key for name in ("a", "b") for digest in ("0" * 64, "1" * 64)}
    assert len(keys) == 4
    assert LoRARequest("a", 1, "/a", "0").key == LoRARequest("a", 2, "/b", "0").key


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("lora_name", name)
        for name in ("", " ", "a b", "a\n", "a\x00", "a\x85", "\u2028", "a@b", "\ud800", "x" * 257, 3, None)
    ]
    + [("lora_int_id", number) for number in (0, -1, True, "1", 1 << 63)]
    + [("lora_path", path) for path in ("", "a\0b", 3)],
)
def test_a_wrong_value_is_refused_by_the_name_of_its_field(field: str, value: Any) -> None:
    values: dict[str, Any] = {"lora_name": "a", "lora_int_id": 1, "lora_path": "/a"}
    with pytest.raises(InvalidRequest) as refused:
        LoRARequest(**values | {field: value})
    assert refused.value.field == field


def test_names_of_any_script_and_of_hubs_are_names() -> None:
    for name in ("owner/adapter-v1.2", "größer", "模型", "a:b"):
        assert LoRARequest(name, 1, "/a").lora_name == name
