"""Schemas whose objects have no other keys than those that they list, as vLLM's and llama.cpp's grammars read them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Final
from urllib.parse import unquote

_LISTS: Final = ("properties", "patternProperties")
_STATED: Final = ("additionalProperties", "unevaluatedProperties")
_OF_ITEMS: Final = ("items", "prefixItems", "additionalItems", "unevaluatedItems", "contains")
_APART: Final = (*_OF_ITEMS, *_STATED, "propertyNames")
"""Keywords with a schema, or a list of schemas, of other values than the object itself."""
_MAPS_APART: Final = (*_LISTS, "$defs", "definitions")
"""Keywords with such a schema for each of their keys."""
_JOINED: Final = ("allOf", "anyOf", "oneOf", "if", "then", "else", "not")
"""Keywords with a schema, or a list of schemas, of the object itself."""
_ITEMS: Final = "[]"
_ANY_KEY: Final = "*"
"""Stand for keys of values of lists, and of any key; a key of this name stays open."""
_ADDING: Final = frozenset((*_LISTS, *_JOINED, *_OF_ITEMS, *_STATED, "$ref", "dependentSchemas"))
"""Keywords by which a schema may list keys or items."""
_JOINING: Final = frozenset((*_JOINED, "$ref", "$dynamicRef", "$recursiveRef", "dependentSchemas", "dependencies"))
"""Keywords with other schemas of the object itself, whose keys are evaluated, too."""


def closed(schema: Any, *, is_closed: bool = True) -> Any:
    """Return a copy of a schema with `additionalProperties` false in each object that lists its properties.

    is_closed: False leaves these objects open. Either way `unevaluatedProperties` becomes `additionalProperties` where
    both mean the same, and the schema `true` becomes an object without keywords.

    Objects that say themselves which others they have stay as they are, and so do those that need keys that they do
    not list. Where several schemas list properties of one object (`allOf`, `properties` beside a `$ref`, `if`), each
    would exclude the keys of the others: they stay, too, and so do their values that several of them describe.
    """
    text = json.dumps({} if schema is True else schema)
    copy = json.loads(text)
    # schemas that are referred to by other names than their paths are not found here
    is_closed = is_closed and '"$anchor"' not in text and text.count('"$id"') < 2
    if not is_closed and "unevaluatedProperties" not in text:
        return copy
    left: list[tuple[Any, bool]] = [(copy, False)]  # with whether other schemas list keys of the same objects
    found: dict[int, dict[str, Any]] = {}
    parts: set[int] = set()
    listed: dict[str, list[Any]] = {}
    seen: set[tuple[int, bool]] = set()
    while left:
        each, is_part = left.pop()
        if isinstance(each, list):
            left += ((one, is_part) for one in each)
        if not isinstance(each, dict) or (id(each), is_part) in seen:
            continue
        seen.add((id(each), is_part))
        found[id(each)] = each
        is_part = is_part or _has_parts(each)
        needed, target = _required(each), _target(copy, each.get("$ref"))
        if (is_part or each.get("patternProperties")) and id(each) not in parts:
            left += ((one, True) for one in _shared_values(each, listed if is_part else {}))
        if is_part:
            parts.add(id(each))
        if is_part or not needed <= _keys_of(target):
            left.append((target, True))
        left += ((one, False) for one in _apart(each))
        for name in _JOINED:
            is_other = is_part or name in ("if", "not")
            left += ((one, is_other or not needed <= _keys_of(one)) for one in _listed(each.get(name)))
        left += ((one, True) for one in _values(each.get("dependentSchemas")))
    for number, each in found.items():
        if is_closed and number not in parts and _can_be_closed(each):
            each["additionalProperties"] = False
        if each.get("unevaluatedProperties") is True or _JOINING.isdisjoint(each):
            _name_the_others(each)
    return copy


def _shared_values(schema: dict[str, Any], listed: dict[str, list[Any]]) -> Iterator[Any]:
    """Yield the values that a schema describes and that another one, or another keyword of it, may describe, too.

    listed: the values of such schemas so far, by key; those of this one are added.
    """
    given = schema.get("properties")
    own = [*given.items()] if isinstance(given, dict) else []
    own += [(_ITEMS, schema[name]) for name in _OF_ITEMS if name in schema]
    of_others = (*_values(schema.get("patternProperties")), *(schema.get(name) for name in _STATED))
    patterns = [each for each in of_others if isinstance(each, dict) and each]
    if patterns and _ANY_KEY not in listed:
        yield from (each for values in listed.values() for each in values)
    own += [(_ANY_KEY, each) for each in patterns]
    has_patterns = bool(patterns) or _ANY_KEY in listed
    for key, value in own:
        values = listed.setdefault(key, [])
        values.append(value)
        if has_patterns or len(values) > 1:
            yield from values[:1] if len(values) == 2 else ()
            yield value


def _name_the_others(schema: dict[str, Any]) -> None:
    """Change `unevaluatedProperties`, which llguidance does not have, to `additionalProperties`.

    They mean the same in a schema that holds no other schema of its object; `true` excludes nothing in any.
    """
    if "unevaluatedProperties" in schema:
        others = schema.pop("unevaluatedProperties")
        schema.setdefault("additionalProperties", others)


def _can_be_closed(schema: dict[str, Any]) -> bool:
    """Return whether a schema lists properties and an object of these alone can be what it asks for."""
    if any(name in schema for name in _STATED) or not any(isinstance(schema.get(name), dict) for name in _LISTS):
        return False
    listed = _keys_of(schema)
    branches = (each for name in _JOINED if name != "not" for each in _listed(schema.get(name)))
    # a hostile pattern takes Python's `re` for ever: whether a needed key has one is not asked
    if any(not _required(each) <= listed for each in (schema, *branches)):
        return False
    least = schema.get("minProperties", 0)
    return bool(schema.get("patternProperties")) or not isinstance(least, int) or least <= len(listed)


def _keys_of(schema: Any) -> set[str]:
    """Return the keys that a schema lists and that may have a value."""
    given = schema.get("properties") if isinstance(schema, dict) else None
    return {name for name in given if given[name] is not False} if isinstance(given, dict) else set()


def _required(schema: Any) -> set[str]:
    names = schema.get("required") if isinstance(schema, dict) else None
    return {each for each in names if isinstance(each, str)} if isinstance(names, list) else set()


def _has_parts(schema: dict[str, Any]) -> bool:
    """Return whether several schemas list the keys of one object."""
    if _JOINING.isdisjoint(schema):
        return False
    branches = [each for name in ("allOf", "then", "else") for each in _listed(schema.get(name)) if _adds(each)]
    choices = [name for name in ("anyOf", "oneOf") if any(map(_adds, _listed(schema.get(name))))]
    lists = any(isinstance(schema.get(name), dict) for name in _LISTS)
    return lists + len(branches) + len(choices) + ("$ref" in schema) + ("dependentSchemas" in schema) > 1


def _adds(schema: Any) -> bool:
    return isinstance(schema, dict) and not _ADDING.isdisjoint(schema)


def _apart(schema: dict[str, Any]) -> Iterator[Any]:
    yield from (schema[name] for name in _APART if name in schema)
    for name in _MAPS_APART:
        yield from _values(schema.get(name))


def _values(value: Any) -> list[Any]:
    return [*value.values()] if isinstance(value, dict) else []


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _target(schema: Any, pointer: Any) -> Any:
    """Return the part of a schema at a JSON pointer (RFC 6901) such as "#/$defs/a", which a URI may precede; None
    where there is none."""
    if not isinstance(pointer, str):
        return None
    for key in pointer.partition("#")[2].split("/")[1:]:
        name = unquote(key).replace("~1", "/").replace("~0", "~")
        if isinstance(schema, list) and name.isdecimal() and len(name) < 10 and int(name) < len(schema):
            schema = schema[int(name)]
        elif isinstance(schema, dict):
            schema = schema.get(name)
        else:
            return None
    return schema
