"""The keys that a library's refusal is about."""

from __future__ import annotations

from typing import Any

import pytest

from octavo.config import blamed_keys as module
from octavo.config.blamed_keys import blamed_keys


def make(values: dict[str, Any]) -> None:
    """What takes a width that its heads divide, and only one activation."""
    vision = values["vision_config"]
    if vision.get("width", 8) % vision.get("heads", 2):
        raise ZeroDivisionError("no such heads")
    if values.get("rope_parameters", {}).get("type", "default") != "default":
        raise KeyError(values["rope_parameters"]["type"])


def refuse(values: dict[str, Any]) -> None:
    raise KeyError


def test_each_key_without_which_values_are_taken_is_named_with_its_value() -> None:
    error = KeyError("magic")
    rope = {"type": "magic", "base": 1}
    assert blamed_keys(error, {"vision_config": {"width": 8}, "rope_parameters": rope}, make) == (
        'rope_parameters.type is "magic"'
    )
    wrong = {"name": "x", "vision_config": {"depth": 1, "width": 10, "heads": 4}}
    assert blamed_keys(error, wrong, make) == "vision_config.width is 10 or vision_config.heads is 4"
    assert blamed_keys(error, wrong, refuse) == ""
    assert wrong == {"name": "x", "vision_config": {"depth": 1, "width": 10, "heads": 4}}
    assert blamed_keys(error, {"kind": {"a": 1}}, lambda values: hash(values.get("kind"))) == 'kind is {"a": 1}'


def test_keys_and_values_in_the_error_and_unusual_values_are_tried_first() -> None:
    tried: list[str] = []
    values = {"width": 8, "depth": 0, "act": "magic", "heads": 3, "name": "x"}

    def note(given: dict[str, Any]) -> None:
        tried.extend(values.keys() - given.keys())
        refuse(given)

    blamed_keys(KeyError("magic: heads"), values, note)
    assert tried == ["act", "heads", "depth", "name", "width"]


def test_the_search_ends_after_three_keys_and_after_some_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[dict[str, Any]] = []
    assert blamed_keys(KeyError(), dict.fromkeys("abcde", 0), tried.append) == "a is 0 or b is 0 or c is 0"
    assert len(tried) == 3
    monkeypatch.setattr(module, "_SECONDS", -1.0)
    assert blamed_keys(KeyError(), {"a": 0}, tried.append) == ""
    assert len(tried) == 3
