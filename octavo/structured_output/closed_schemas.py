"""Schemas whose objects have no other keys than those that they list."""

from __future__ import annotations

from typing import Any, Final

_MAPS: Final = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
"""Keywords with a schema for each of their keys."""
_SCHEMAS: Final = (
    *("items", "prefixItems", "additionalItems", "unevaluatedItems", "contains"),
    *("additionalProperties", "unevaluatedProperties", "propertyNames"),
    *("anyOf", "oneOf", "allOf", "not", "if", "then", "else"),
)
"""Keywords with a schema, or with a list of schemas."""


def closed(schema: Any) -> Any:
    """Return a schema with `additionalProperties` false in each object that lists properties and does not say more."""
    copy = _copied(schema)
    left = [copy]
    while left:
        each = left.pop()
        if isinstance(each, list):
            left += each
        if not isinstance(each, dict):
            continue
        if "additionalProperties" not in each and any(isinstance(each.get(name), dict) for name in _MAPS[:2]):
            each["additionalProperties"] = False
        for name in _MAPS:
            if isinstance(each.get(name), dict):
                left += each[name].values()
        left += (each[name] for name in _SCHEMAS if name in each)
    return copy


def _copied(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _copied(each) for name, each in value.items()}
    return [_copied(each) for each in value] if isinstance(value, list) else value
