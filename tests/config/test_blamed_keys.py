"""The keys that a library's refusal is about."""

from __future__ import annotations

from typing import Any

import pytest

from octavo.config import blamed_keys as module
from octavo.config.blamed_keys import blamed_keys


def make(values: dict[str, Any]) -> None:
    """What takes a width that its heads divide, and only one activation."""
    vision = values["vision"]
    if vision.get("width", 8) % vision.get("heads", 2):
        raise ZeroDivisionError("no such heads")
    if values.get("rope", {}).get("type", "default") != "default":
        raise KeyError(values["rope"]["type"])


def test_each_key_without_which_values_are_taken_is_named_with_its_value() -> None:
    assert blamed_keys({"vision": {"width": 8}, "rope": {"type": "magic", "base": 1}}, make) == 'rope.type is "magic"'
    wrong = {"name": "x", "vision": {"depth": 1, "width": 10, "heads": 4}}
    assert blamed_keys(wrong, make) == "vision.width is 10 or vision.heads is 4"
    assert blamed_keys(wrong, lambda _: {}["always"]) == ""
    assert wrong == {"name": "x", "vision": {"depth": 1, "width": 10, "heads": 4}}


def test_the_search_ends_after_three_keys_and_after_some_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[dict[str, Any]] = []
    assert blamed_keys(dict.fromkeys("abcde", 0), tried.append) == "a is 0 or b is 0 or c is 0"
    assert len(tried) == 3
    monkeypatch.setattr(module, "_SECONDS", -1.0)
    assert blamed_keys({"a": 0}, tried.append) == ""
    assert len(tried) == 3
