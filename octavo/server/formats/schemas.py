"""Reads the parts of tools' JSON schemas that grammars of calls need."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from octavo.errors import InvalidRequest

SPELLED: Final = frozenset(
    ("type", "title", "description", "properties", "required", "additionalProperties", "items", "$defs", "definitions")
)
"""Keywords of schemas of objects and lists that tags within tags follow; with others a value is written as JSON."""
ANY: Final = r"(.|\n)*"
_ANCHORED: Final = re.compile(r"(\^?)(.*?)((?<!\\)\$)?", re.DOTALL)
_GROUPED: Final = re.compile(r"\\.|\[(?:\\.|[^\]\\])*\]|\([^()]*\)", re.DOTALL)
_UNESCAPED: Final = re.compile(r"(\\.)|[/\n]")


def text_pattern(schema: Mapping[str, Any]) -> str:
    """Return the pattern of a string's schema as a terminal; "" for any text. Raises InvalidRequest."""
    least, most, terminals = schema.get("minLength", 0), schema.get("maxLength"), []
    if least or most is not None:
        terminals.append(rf"/(.|\n){{{least},{'' if most is None else most}}}/")
    if "pattern" in schema:
        begin, body, end = _ANCHORED.fullmatch(str(schema["pattern"])).groups()  # type: ignore[union-attr]
        if (begin or end) and "|" in _without_groups(body):
            raise InvalidRequest(
                f"tools: the pattern {schema['pattern']!r:.60} has anchors beside alternatives; write ^(?:a|b)$",
                field="tools",
                code="invalid_grammar",
            )
        body = _UNESCAPED.sub(lambda each: each[1] or {"/": r"\/", "\n": r"\n"}[each[0]], body)
        terminals.append(f"/{'' if begin else ANY}({body}){'' if end else ANY}/")
    return f"({' & '.join(terminals)})" if terminals else ""


def _without_groups(regex: str) -> str:
    shorter = _GROUPED.sub("", regex)
    return regex if shorter == regex else _without_groups(shorter)


def properties_of(schema: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the schemas of properties, each with the definitions that it may refer to."""
    properties = schema.get("properties")
    shared = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
    given = properties.items() if isinstance(properties, Mapping) else ()
    return {key: {**each, **shared} if isinstance(each, Mapping) else dict(shared) for key, each in given}


def required_of(schema: Mapping[str, Any]) -> Sequence[str]:
    """Return the names of the properties that must be there. Raises InvalidRequest."""
    names = schema.get("required") or ()
    if isinstance(names, list | tuple):
        return names
    raise InvalidRequest(
        f"the schema of a tool has required={str(names)[:100]}, expected a list of names", field="tools"
    )
