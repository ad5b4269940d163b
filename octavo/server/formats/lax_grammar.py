"""The grammar of the arguments that `lax` reads, in Lark's notation."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from octavo.server.formats.marks import Mark
from octavo.server.formats.schemas import SPELLED, properties_of, text_pattern

if TYPE_CHECKING:
    from octavo.server.formats.grammar import CallGrammar

_PLAIN: Final = frozenset(("integer", "number", "boolean", "null"))
_NO_KEY: Final = re.compile(r"[:,{}\[\]\"]|^\s|\s$|^$")
"""Matches characters that make a key be written with quotes."""
_ANY_KEY: Final = r"/[^:,{}\[\]<>\"\s]{1,64}/"


class LaxGrammar:
    """Makes the rules of values. quote: the mark on both sides of texts.

    Objects and lists whose schema has keywords outside of `SPELLED` are written as JSON.
    """

    def __init__(self, rules: CallGrammar, quote: str) -> None:
        self._rules, self._quote = rules, Mark.of(quote)

    def value(self, schema: Mapping[str, Any], number: str) -> str:
        """Return the rule of a value of a schema. number: makes the names of its sub-rules unique."""
        kind, is_spelled = schema.get("type"), schema.keys() <= SPELLED
        words = schema.get("enum", [schema["const"]] if "const" in schema else None)
        if self._quote.spelled() == '"' or (isinstance(kind, str) and kind in _PLAIN):
            return self._rules.json(schema)
        if isinstance(words, list) and all(isinstance(word, str) for word in words):
            texts = (self._rules.spelled(f"{self._quote.spelled()}{word}{self._quote.spelled()}") for word in words)
            return f"({' | '.join(texts)})"
        if kind == "string":
            return self._text(f"v{number}", text_pattern(schema) if self._rules.is_strict else "")
        if kind == "object" and is_spelled and properties_of(schema):
            return f'"{{" {self._rules.listed(schema, number, ",", self._part)} "}}"'
        if kind == "object" and schema.get("properties") == {} and schema.get("additionalProperties") is False:
            return '"{" "}"'
        if kind == "array" and is_spelled and schema.get("items"):
            item = properties_of({**schema, "properties": {"item": schema["items"]}})["item"]
            one = self._rules.rule(f"i{number}", self.value(item, f"{number}i"))
            return f'"[" ({one} ("," {one})*)? "]"'
        if is_spelled and kind in (None, "object", "array"):
            self._add_any()
            return {None: "lax_value", "object": "lax_object", "array": "lax_list"}[kind]
        return self._rules.json(schema)

    def _part(self, key: str, schema: Mapping[str, Any], number: str) -> str:
        written = json.dumps(key, ensure_ascii=False) if _NO_KEY.search(key) else key
        return f"{self._rules.spelled(f'{written}:')} {self.value(schema, number)}"

    def _text(self, name: str, pattern: str = "") -> str:
        quote = self._rules.spelled(self._quote.spelled())
        return f"{quote} {self._rules.until(name, self._quote, pattern=pattern)}"

    def _add_any(self) -> None:
        """Add the rules of values without a schema, once."""
        rule = self._rules.rule
        if self._rules.has("lax_text"):
            return
        plain = self._rules.json({"type": [*sorted(_PLAIN - {"integer"})]})
        rule("lax_text", self._text("lax_inner"))
        rule("lax_value", f"lax_text | lax_object | lax_list | {plain}")
        rule("lax_list", '"[" (lax_value ("," lax_value)*)? "]"')
        rule("lax_pair", f'{_ANY_KEY} ":" lax_value')
        rule("lax_object", '"{" (lax_pair ("," lax_pair)*)? "}"')
