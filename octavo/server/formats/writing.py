"""Makes the events of calls and the JSON of values, for all readers of calls."""

from __future__ import annotations

import ast
import json
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any, Final
from uuid import uuid4

import msgspec

from octavo.server.formats.events import OutputEvent, ToolCallBegin, ToolCallDelta, ToolCallEnd
from octavo.server.formats.marks import Found
from octavo.server.formats.source import Malformed

_KINDS: Final[Mapping[type, str]] = {
    str: "string",
    bool: "boolean",
    int: "integer",
    float: "number",
    dict: "object",
    list: "array",
    type(None): "null",
}
"""The types of JSON schemas of values."""


class CallWriter:
    """Makes the events of the calls of one choice. tools: the schemas of parameters by name.

    is_cut: whether the text ended within the last call.
    """

    def __init__(self, tools: Mapping[str, Mapping[str, Any]], id_chars: int = 0, id_form: str = "") -> None:
        self.tools = tools
        self.num_calls = 0
        self.is_cut = False
        self._id_chars, self._id_form = id_chars, id_form

    def begin(self, name: str, found: Found | None = None) -> ToolCallBegin:
        """Begin a call, to which the next pieces belong. found: its open mark, if the mark contains the name."""
        self.num_calls += 1
        if self._id_form and found is not None:
            return ToolCallBegin(self.num_calls - 1, self._id_form.format_map(found.groups), name)
        digits = uuid4().hex
        call_id = digits[: self._id_chars] if self._id_chars else f"call_{digits[:24]}"
        return ToolCallBegin(self.num_calls - 1, call_id, name)

    def name_in(self, found: Found | None) -> str:
        """Return the name of the tool in an open mark; Muse writes it twice, with a full stop between."""
        name = "" if found is None else found.groups.get("name", "").strip()
        first, _, second = name.partition(".")
        return first if first == second and name not in self.tools and first in self.tools else name

    def take_back(self) -> None:
        """Forget the call that has begun."""
        self.num_calls -= 1

    def piece(self, arguments: str) -> Iterable[OutputEvent]:
        return (ToolCallDelta(self.num_calls - 1, arguments),) if arguments else ()

    def end(self, *, is_cut: bool = False) -> ToolCallEnd:
        self.is_cut = is_cut
        return ToolCallEnd(self.num_calls - 1, is_cut)

    def schema(self, name: str, key: str) -> Mapping[str, Any]:
        """Return the schema of one argument of a tool; an empty one where it has none."""
        properties = self.tools.get(name, {}).get("properties")
        found = properties.get(key) if isinstance(properties, Mapping) else None
        return found if isinstance(found, Mapping) else {}


def kept_in(pieces: list[str]) -> Callable[[str], Iterable[OutputEvent]]:
    """Return a function that appends each piece of a text to `pieces` and returns no events."""

    def keep(piece: str) -> Iterable[OutputEvent]:
        pieces.append(piece)
        return ()

    return keep


def decoded(text: str) -> str:
    """Return the text that a JSON string stands for. Raises Malformed for anything else."""
    try:
        return msgspec.json.decode(text, type=str)
    except (msgspec.DecodeError, UnicodeEncodeError):
        raise Malformed from None


def quoted(writer: CallWriter, piece: str) -> Iterable[OutputEvent]:
    """Return the events of a piece of a text within quotes."""
    return writer.piece(json.dumps(piece, ensure_ascii=False)[1:-1])


def is_text(schema: Mapping[str, Any], is_marked: bool = False) -> bool:
    """Return whether a value is a text, whatever it looks like. is_marked: the model marked it as a text, which decides
    where the schema allows several types."""
    kind = schema.get("type")
    return kind == "string" or (is_marked and not isinstance(kind, str))


def typed(text: str, schema: Mapping[str, Any], *, is_exact: bool = False) -> str:
    """Return the JSON of a value that is written as text: a value of the schema's types if it can be read as one, else
    a text. is_exact: a text keeps the white space at its ends.
    """
    inner = text.strip()
    words, kinds = schema.get("enum"), _types(schema)
    if isinstance(words, list) and inner in words:
        return json.dumps(inner, ensure_ascii=False)
    found = _read(inner)
    if found is not None and ("string" not in kinds or _KINDS[type(found[0])] in kinds):
        return found[1]
    return json.dumps(text if is_exact else inner, ensure_ascii=False)


def is_value(text: str) -> bool:
    """Return whether a text is a value as JSON or as Python writes it."""
    return _read(text.strip()) is not None


def _types(schema: Mapping[str, Any]) -> set[str]:
    """Return the types that a schema allows; none where it states no type."""
    kind = schema.get("type")
    kinds = {kind} if isinstance(kind, str) else {*filter(lambda each: isinstance(each, str), kind or ())}
    for name in ("anyOf", "oneOf"):
        choices = schema.get(name)
        for each in choices if isinstance(choices, list) else ():
            kinds |= _types(each) if isinstance(each, Mapping) else set()
    return kinds | {"integer"} if "number" in kinds else kinds


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def _read(text: str) -> tuple[Any, str] | None:
    """Return the value that a text is, as JSON or as Python writes it, and its JSON; None for any other text."""
    with suppress(ValueError, RecursionError):
        return json.loads(text, parse_constant=_refuse), text
    with suppress(ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        found = json.dumps(ast.literal_eval(text), ensure_ascii=False, allow_nan=False)
        return json.loads(found), found
    return (text.lower() == "true", text.lower()) if text.lower() in ("true", "false") else None
