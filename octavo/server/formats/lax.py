"""Reads the arguments of calls in a JSON with bare keys and marks of its own around texts, as models of Gemma write."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, Final

from octavo.server.formats.events import OutputEvent
from octavo.server.formats.marks import Mark, Marks
from octavo.server.formats.source import Malformed, Reading, Source
from octavo.server.formats.writing import CallWriter, decoded, is_text, kept_in, quoted, typed

_MOST_DEPTH: Final = 64
_MOST_CHARS: Final = 4096
"""Characters of a key, or of a value without quotes."""
_KEY: Final = re.compile(r"[^:,{}\[\]\"]*")
_BARE: Final = re.compile(r"[^,}\]]*")


class LaxValues:
    """Reads values, and writes them as JSON while they come. quote: the mark on both sides of texts."""

    def __init__(self, source: Source, writer: CallWriter, quote: str) -> None:
        self._source, self._writer, self._quote = source, writer, quote
        self._quotes = Marks((Mark.of(quote),))

    def read_object(self, schema: Mapping[str, Any], depth: int) -> Reading[None]:
        """Read the object that begins here. Raises Malformed where it does not end."""
        properties, joint = schema.get("properties"), "{"
        self._source.at += 1
        while (char := (yield from self._source.peek())) != "}":
            if char == ",":
                self._source.at += 1
                continue
            key = yield from self._key(char)
            each = properties.get(key) if isinstance(properties, Mapping) else None
            yield from self._writer.piece(f"{joint}{json.dumps(key, ensure_ascii=False)}: ")
            joint = ", "
            yield from self._value(each if isinstance(each, Mapping) else {}, depth + 1)
        self._source.at += 1
        yield from self._writer.piece("{}" if joint == "{" else "}")

    def _key(self, char: str) -> Reading[str]:
        """Return the key that begins here, and go behind its colon."""
        pieces: list[str] = []
        if (yield from self._is_quoted()):
            yield from self._text(pieces)
            key = "".join(pieces)
        elif char == '"':
            yield from self._source.json(kept_in(pieces))
            key = decoded("".join(pieces))
        else:
            key = (yield from self._source.word(_KEY, _MOST_CHARS)).strip()
        if (yield from self._source.peek()) != ":":
            raise Malformed
        self._source.at += 1
        return key

    def _value(self, schema: Mapping[str, Any], depth: int) -> Reading[None]:
        char = yield from self._source.peek()
        pieces: list[str] = []
        if (yield from self._is_quoted()):
            if is_text(schema, is_marked=True) and "enum" not in schema:
                yield from self._writer.piece('"')
                yield from self._quoted_text()
                yield from self._writer.piece('"')
                return
            yield from self._text(pieces)
            yield from self._writer.piece(typed("".join(pieces), schema, is_exact=True))
        elif depth > _MOST_DEPTH:
            raise Malformed
        elif char == "{":
            yield from self.read_object(schema, depth)
        elif char == "[":
            yield from self._list(schema, depth)
        elif char == '"':
            yield from self._source.json(self._writer.piece)
        else:
            text = yield from self._source.word(_BARE, _MOST_CHARS)
            if self._source.at == len(self._source.text):  # the text was cut
                raise Malformed
            if is_text(schema) and text.strip() != "null":
                yield from self._writer.piece(json.dumps(text.strip(), ensure_ascii=False))
            else:
                yield from self._writer.piece(typed(text, schema))

    def _list(self, schema: Mapping[str, Any], depth: int) -> Reading[None]:
        items, joint = schema.get("items"), "["
        self._source.at += 1
        while (char := (yield from self._source.peek())) != "]":
            if char == ",":
                self._source.at += 1
                continue
            if char in ("", "}"):
                raise Malformed
            yield from self._writer.piece(joint)
            joint = ", "
            yield from self._value(items if isinstance(items, Mapping) else {}, depth + 1)
        self._source.at += 1
        yield from self._writer.piece("[]" if joint == "[" else "]")

    def _is_quoted(self) -> Reading[bool]:
        """Return whether the mark of texts is here, and go behind it."""
        if self._quote == '"':
            return False
        source = self._source
        while not source.is_last and self._quote.startswith(source.text[source.at :]):
            yield None
        is_here = source.text.startswith(self._quote, source.at)
        source.at += len(self._quote) if is_here else 0
        return is_here

    def _text(self, pieces: list[str]) -> Reading[None]:
        if (yield from self._source.until(self._quotes, kept_in(pieces))) is None:
            raise Malformed

    def _quoted_text(self) -> Reading[None]:
        def emit(piece: str) -> tuple[OutputEvent, ...]:
            return tuple(quoted(self._writer, piece))

        if (yield from self._source.until(self._quotes, emit)) is None:
            raise Malformed
