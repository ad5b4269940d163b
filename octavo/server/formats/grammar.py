"""The grammar of the calls of a request, in Lark's notation, from the marks that the parser reads them by."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any, Final

from octavo.core.structured_outputs import StructuredOutputsParams
from octavo.engine.text.tokenizer import Tokenizer
from octavo.errors import InvalidRequest
from octavo.server.formats.format import Format
from octavo.server.formats.lax_grammar import LaxGrammar
from octavo.server.formats.marks import Mark, pieces_of
from octavo.server.formats.schemas import ANY, SPELLED, properties_of, required_of, text_pattern
from octavo.server.schema.chat import ChatCompletionRequest
from octavo.server.schema.tools import Tool
from octavo.structured_output.closed_schemas import closed

_STRICT: Final = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_LENIENT: Final = {**_STRICT, "lenient": True}
_ANY_OBJECT: Final = {"type": "object"}
_NOTHING: Final = {"type": "object", "properties": {}, "additionalProperties": False}
_TEXT: Final = f"/{ANY}/"
_LAZY: Final = r"/(.|\n)*?/"

Part = Callable[[str, Mapping[str, Any], str], str]
"""Returns the rule of a property from its key, its schema and a number for the names of its sub-rules."""


class CallGrammar:
    """Builds the rules of one grammar."""

    def __init__(self, form: Format, asked: ChatCompletionRequest, tokenizer: Tokenizer) -> None:
        assert form.calls is not None
        self._calls = calls = form.calls
        self._asked = asked
        self._then = form.reasoning.then if form.reasoning is not None else ""
        self._special = {tokenizer.added_tokens[token_id]: token_id for token_id in tokenizer.special_ids}
        spellings = sorted(filter(None, self._special), key=len, reverse=True)
        self._cut = re.compile(f"({'|'.join(map(re.escape, spellings)) or '(?!)'})")
        # the grammar begins behind the trigger, the text before the name
        is_free = not (asked.must_call or calls.is_bare)
        self._trigger = (calls.begin.strip() or calls.opens[0].pieces[0].literal) if is_free else ""
        self._options: Mapping[str, Any] = _STRICT
        self._rules = [r"SPACE: /[ \n]{0,2}/", rf"TEXT: {_TEXT}"]

    def form(self) -> StructuredOutputsParams:
        """Return the form of the part of a response that follows its reasoning.

        If the request demands calls, that part is calls alone; else any text, with calls of this form behind each open
        mark.
        """
        calls, trigger = self._calls, self._trigger
        is_list = calls.is_list or calls.content == "pythonic"
        brackets = ('"["', '"]"') if not calls.separator else ("", "")
        tools = enumerate(self._asked.callable_tools)
        one = f"({' | '.join(self.rule(f'c{number}', self._call(tool, number, is_list)) for number, tool in tools)})"
        joint = '", "' if is_list and not calls.separator else self.spelled(calls.separator)
        is_single = self._asked.calls_once
        body = one if is_single or (trigger and not is_list and not calls.begin) else f"{one} ({joint} {one})*"
        if is_list:
            body = f"{brackets[0]} {body} {brackets[1]}"
            if not calls.is_bare:
                body = f"{self._open()} {body} {self._mark(*calls.closes[:1])}"
        if self._asked.must_call:
            then = f"({self.spelled(self._then)})?" if self._then else ""
            leads = " ".join(f"({self._mark(Mark(tuple(pieces_of(lead))))})?" for lead in calls.leads)
            start = f"SPACE {then} {leads} {self.spelled(calls.begin)} {body} {self.spelled(calls.end)}"
        elif trigger:
            start = f"{'SPACE' if calls.begin else ''} {body} {self.spelled(calls.end)}"
        else:
            start = rf"{body} | /([^\[{{ \n](.|\n)*)?/"
        text = "\n".join(["%llguidance {}", f"start: {start}", *self._rules]) + "\n"
        triggers = (trigger,) if trigger else ()
        return StructuredOutputsParams(grammar=text, triggers=triggers, stop_after_first=bool(trigger and is_single))

    def rule(self, name: str, body: str) -> str:
        self._rules.append(f"{name}: {body}")
        return name

    def has(self, name: str) -> bool:
        """Return whether there is a rule of this name."""
        return any(rule.startswith(f"{name}:") for rule in self._rules)

    def _call(self, tool: Tool, number: int, is_list: bool) -> str:
        """Return the rule of one call, with its marks unless they are around all calls."""
        calls, name = self._calls, tool.function.name
        schema = closed(tool.function.parameters or _NOTHING)
        if schema.setdefault("type", "object") != "object":
            field = f"tools[{(self._asked.tools or []).index(tool)}].function.parameters"
            raise InvalidRequest(f"{field}.type is {schema['type']!r:.60}, must be 'object'", field=field)
        is_loose = not (self._asked.must_call or tool.function.strict)
        # only strict tools promise every keyword; for other tools, keywords that the grammar does not know are ignored
        self._options = _STRICT if tool.function.strict else _LENIENT
        if calls.content == "pythonic":
            return f"{self.spelled(f'{name}(')} {self._keywords(schema, number)} {self.spelled(')')}"
        if calls.content == "tags":
            body = self._tags(schema, f"{number}")
        elif calls.content == "json":
            body = self.json(_ANY_OBJECT if is_loose else schema)
        elif calls.content == "lax":
            body = LaxGrammar(self, calls.quote).value(_ANY_OBJECT if is_loose else schema, f"{number}")
        elif calls.is_keyed:
            body = f'{self.spelled(f"{{{json.dumps(name)}: ")} {self.json(_ANY_OBJECT if is_loose else schema)} "}}"'
        else:
            head = f'{{"{calls.name_key}": {json.dumps(name)}, "{calls.arguments_key}": '
            body = f'{self.spelled(head)} {self.json(_ANY_OBJECT if is_loose else schema)} "}}"'
        if is_list or calls.is_bare:
            return body
        close = self._mark(*calls.closes[:1])
        return f"{self._open(name)} SPACE {body} {f'SPACE {close}' if close else ''}"

    def _tags(self, schema: Mapping[str, Any], number: str) -> str:
        """Return the arguments of a call between tags, in the order of the schema."""
        required = required_of(schema)
        parts = []
        for place, (key, each) in enumerate(properties_of(schema).items()):
            name = self._tag(key, each, f"{number}_{place}")
            parts.append(name if key in required else f"{name}?")
        return " ".join(parts)

    def _tag(self, key: str, schema: Mapping[str, Any], number: str) -> str:
        """Return the rule of one value between tags."""
        tag = self._calls.tag
        assert tag is not None
        line = "" if tag.open.is_spaced or tag.close.is_spaced or tag.is_exact else r'"\n"'
        close, kind = tag.end(key), schema.get("type")
        names = {"integer": "number", **{name: name for name in ("string", "number", "boolean", "null", "array")}}
        groups = {"is_string": "true" if kind == "string" else "false", "type": names.get(f"{kind}", "object")}
        words = schema.get("enum", [schema["const"]] if isinstance(schema.get("const"), str) else None)
        if kind == "string" and isinstance(words, list):
            value = f"({' | '.join(self.spelled(str(word)) for word in words)}) {line} {self._mark(close)}"
        elif kind == "string":
            pattern = text_pattern(schema) if self.is_strict else ""
            value = self.until(f"v{number}", close, line, pattern)
        elif tag.is_nested and schema.keys() <= SPELLED and kind == "object" and properties_of(schema):
            value = f"SPACE {self._tags(schema, number)} {self._mark(close)}"
        elif tag.is_nested and schema.keys() <= SPELLED and kind == "array" and schema.get("items"):
            items = properties_of({**schema, "properties": {"item": schema["items"]}})["item"]
            value = f"SPACE {self._tag('item', items, number + 'i')}* {self._mark(close)}"
        else:
            value = f"{self.json(schema)} {line} {self._mark(close)}"
        return self.rule(f"p{number}", f"{self._mark(tag.open, key=key, **groups)} {line} {value} SPACE")

    def _keywords(self, schema: Mapping[str, Any], number: int) -> str:
        """Return the arguments of a Python call: those that are required first, then any of the others."""

        def part(key: str, each: Mapping[str, Any], _: str) -> str:
            value = '("True" | "False")' if each.get("type") == "boolean" else self.json(each)
            return f"{self.spelled(f'{key}=')} {value}"

        return self.listed(schema, f"{number}", ", ", part)

    def listed(self, schema: Mapping[str, Any], number: str, joint: str, part: Part) -> str:
        """Return the rule of the properties of a schema, joined by `joint`: the required ones first, then any of the
        others."""
        required, properties = required_of(schema), properties_of(schema)
        keys = sorted(properties, key=lambda key: key not in required)
        behind, first, between = '""', '""', json.dumps(joint)
        for place, key in reversed([*enumerate(keys)]):
            one = self.rule(f"k{number}_{place}", part(key, properties[key], f"{number}_{place}"))
            following = self.rule(f"t{number}_{place}", behind)
            behind = f"{between} {one} {following}" if key in required else f"({between} {one})? {following}"
            first = f"{one} {following}" if key in required else f"{one} {following} | {first}"
            first = self.rule(f"f{number}_{place}", first)
        return first if keys else ""

    @property
    def is_strict(self) -> bool:
        """Whether the current tool is strict."""
        return self._options is _STRICT

    def json(self, schema: Mapping[str, Any]) -> str:
        return f"%json {json.dumps({**schema, 'x-guidance': self._options})}"

    def until(self, name: str, close: Mark, line: str = "", pattern: str = "") -> str:
        """Return a text that ends at its first mark `close`, and the mark. pattern: what the text matches."""
        mark = self._mark(close)
        if "<[" in mark:
            return f"{pattern or 'TEXT'} {line} {mark}"
        return self.rule(f"{name}[lazy]", f"{pattern or _LAZY} {line} {mark}").removesuffix("[lazy]")

    def _open(self, name: str = "") -> str:
        mark = self._calls.opens[0]
        return self._mark(Mark(mark.pieces[1:]) if self._trigger and not self._calls.begin else mark, name=name)

    def _mark(self, mark: Mark | None = None, **groups: str) -> str:
        pieces = () if mark is None else mark.pieces
        return " ".join(
            "SPACE"
            if piece.is_space
            else f"/{piece.gap}/"
            if piece.group and piece.group not in groups
            else self.spelled(piece.literal or groups.get(piece.group, ""))
            for piece in pieces
        )

    def spelled(self, text: str) -> str:
        """Return a text in the notation of the grammar; special tokens are written by id, as no text spells them."""
        parts = filter(None, self._cut.split(text))
        return " ".join(f"<[{self._special[part]}]>" if part in self._special else json.dumps(part) for part in parts)
