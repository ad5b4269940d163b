"""Readers of calls: from the text between the marks to the name of a tool and arguments as JSON, as they come."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any, Final
from xml.sax.saxutils import unescape

from octavo.server.formats.format import CallFormat, Content, TagFormat
from octavo.server.formats.lax import LaxValues
from octavo.server.formats.marks import MOST_NAME, Found, Marks
from octavo.server.formats.source import Emit, Malformed, Reading, Source, Trimmed, nothing
from octavo.server.formats.writing import CallWriter, decoded, is_text, is_value, kept_in, quoted, typed

_MOST_KEY: Final = 1024
_MOST_DEPTH: Final = 64
"""Tags within tags that are read as such; deeper ones are text."""
_NAME: Final = re.compile(r"[\w.\-]*")
_KEY: Final = re.compile(r"""[^=,()\[\]{}'"]*""")
_QUOTES: Final = re.compile(r"\\.", re.DOTALL)
_NO_XML: Final = re.compile("<|&(?!(?:lt|gt|amp|quot|apos);)")
_OUTSIDE: Final = re.compile(r"""[^'"\[\](){},]*""")
_PAIRS: Final = {"(": 1, "[": 1, "{": 1, ")": -1, "]": -1, "}": -1}


Reader = Callable[[Source, CallFormat, CallWriter, Found | None], Reading[None]]
"""Reads the text after an open mark (None: a bare call, without mark). Raises Malformed for text that is no call, but
only before the begin of the call; text after it is read as arguments, whatever it is."""


def _read_arguments(source: Source, form: CallFormat, writer: CallWriter, found: Found | None) -> Reading[None]:
    """Read the arguments of a call, whose name is in its mark."""
    name, is_cut = writer.name_in(found), False
    yield writer.begin(name, found)
    try:
        if (yield from source.peek()) != "{":
            yield from writer.piece("{}")
        elif form.content == "lax":  # plain JSON is read, too
            yield from LaxValues(source, writer, form.quote).read_object(writer.tools.get(name, {}), 0)
        else:
            yield from source.json(writer.piece)
    except Malformed:
        is_cut = True
    yield writer.end(is_cut=is_cut)


def _read_calls(source: Source, form: CallFormat, writer: CallWriter, found: Found | None) -> Reading[None]:
    """Read objects with a name and arguments, alone or in a list."""
    num_before = writer.num_calls
    while True:
        char = yield from source.peek()
        if char == "{":
            if writer.num_calls > num_before:  # behind a call, text that is no call stays text, too
                source.keep_from(source.at)
            source.at += 1
            yield from _read_call(source, form, writer)
        elif char and char in "[],;":
            source.at += 1
        elif writer.num_calls == num_before:
            raise Malformed
        else:
            return


def _read_call(source: Source, form: CallFormat, writer: CallWriter) -> Reading[None]:
    name = held = None
    num_before = writer.num_calls
    is_cut = False
    try:
        while (char := (yield from source.peek())) != "}":
            if char == ",":
                source.at += 1
                continue
            key = decoded((yield from _value(source)))
            if (yield from source.peek()) != ":":
                raise Malformed
            source.at += 1
            char = yield from source.peek()
            if key == form.name_key and name is None:
                name = decoded((yield from _value(source)))
                if len(name) > MOST_NAME or not name or (form.is_bare and name not in writer.tools):
                    raise Malformed
            elif form.is_keyed and name is None and key and len(key) <= MOST_NAME:
                name, held = key, ""
                is_cut = char == "{"
                yield writer.begin(name)
                if is_cut:
                    yield from source.json(writer.piece)
                    is_cut = False
                else:
                    yield from writer.piece(_object_in((yield from _value(source))))
            elif key in (form.arguments_key, "arguments", "parameters") and held is None:
                if name is not None and char == "{":
                    held, is_cut = "", True
                    yield writer.begin(name)
                    yield from source.json(writer.piece)
                    is_cut = False
                else:
                    held = _object_in((yield from _value(source)))
            else:
                yield from _value(source)
        source.at += 1
        if writer.num_calls == num_before:
            if name is None or (form.is_bare and held is None):
                raise Malformed
            yield writer.begin(name)
            yield from writer.piece(held or "{}")
    except Malformed:
        if writer.num_calls == num_before:
            raise
    yield writer.end(is_cut=is_cut)


def _read_tags(source: Source, form: CallFormat, writer: CallWriter, found: Found | None) -> Reading[None]:
    """Read arguments each of which stands between tags."""
    assert form.tag is not None
    name, joint, is_cut = writer.name_in(found), "{", True
    marks = Marks((form.tag.open, *form.closes, *form.opens))
    yield writer.begin(name)
    while (tag := (yield from source.until(marks, nothing))) is not None and tag.mark == form.tag.open:
        key = tag.groups["key"].strip()
        yield from writer.piece(f"{joint}{json.dumps(key, ensure_ascii=False)}: ")
        joint = ", "
        if not (yield from _read_tag(source, form.tag, writer, tag, writer.schema(name, key))):
            break
    if tag is not None and tag.mark != form.tag.open:
        is_cut = False
        if tag.mark in form.opens:
            source.at -= tag.end - tag.start
        yield from writer.piece("{}" if joint == "{" else "}")
    yield writer.end(is_cut=is_cut)


def _read_tag(
    source: Source, form: TagFormat, writer: CallWriter, found: Found, schema: Mapping[str, Any]
) -> Reading[bool]:
    """Read the value behind the open mark of a tag, and its close mark; return whether there is a close mark."""
    key, is_exact = found.groups["key"].strip(), form.is_nested or form.is_exact
    as_text = is_text(schema, found.groups.get("is_string") == "true" or found.groups.get("type") == "string")
    if as_text and not form.is_xml:
        yield from writer.piece('"')
        only_line = not (form.open.is_spaced or form.close.is_spaced)
        text = Trimmed(lambda piece: quoted(writer, piece), only_line=only_line, is_at_mark=True)
        emit = (lambda piece: quoted(writer, piece)) if is_exact else text
        if (yield from _until_close(source, form, form.closes, key, emit)) is None:
            return False
        yield from text.cut()
        yield from writer.piece('"')
        return True
    if form.is_nested:
        value = yield from _element(source, form, key, schema)
        yield from writer.piece(value or "")
        return value is not None
    pieces: list[str] = []
    if (yield from source.until(form.closes, kept_in(pieces))) is None:
        return False
    if not as_text:
        yield from _read_strings(source, form, pieces)
    value = _xml_text("".join(pieces)) if form.is_xml else "".join(pieces)
    as_json = json.dumps(value, ensure_ascii=False) if as_text else typed(value, schema, is_exact=is_exact)
    yield from writer.piece(as_json)
    return True


def _read_strings(source: Source, form: TagFormat, pieces: list[str]) -> Reading[None]:
    """If the close mark stands within a string of the value's JSON, append the text after it to the pieces of the
    value."""
    read: list[str] = []
    part = "".join(pieces)
    is_within = part.lstrip()[:1] in ("{", "[", '"') and _QUOTES.sub("", part).count('"') % 2 == 1
    while is_within:
        read.append(form.close.spelled())
        found: list[str] = []
        end = yield from source.until(form.closes, kept_in(found))
        read += found
        is_within = _QUOTES.sub("", "".join(found)).count('"') % 2 == 0
        if end is None or (not is_within and not is_value(f"{part}{''.join(read)}")):
            # no such string: the close mark is a real one, and the text after it is read again
            source.push_back("".join([*read[1:], "" if end is None else form.close.spelled()]))
            return
    pieces += read


def _xml_text(text: str) -> str:
    """Return the text that XML (CDATA or entities) encodes; a text that is no XML is returned as it is."""
    if (inner := text.strip()).startswith("<![CDATA[") and inner.endswith("]]>"):
        return inner[len("<![CDATA[") : -len("]]>")]
    return text if _NO_XML.search(text) else unescape(text, {"&quot;": '"', "&apos;": "'"})


def _until_close(source: Source, tag: TagFormat, marks: Marks, key: str, emit: Emit) -> Reading[Found | None]:
    """Read like `Source.until`, but take the close mark of any other key for text."""
    # A mark for each key would be one compiled pattern for each, which takes milliseconds.
    while (found := (yield from source.until(marks, emit))) is not None:
        if found.mark == tag.open or found.groups.get("end", key) == key:
            return found
        # the mark of this key may begin within it
        source.at = found.start + 1
        yield from emit(source.text[found.start : source.at])
    return None


def _element(
    source: Source, tag: TagFormat, key: str, schema: Mapping[str, Any], depth: int = 1
) -> Reading[str | None]:
    """Return the JSON of the content before the close mark of a key: its tags, else its text. None where the text is
    cut."""
    pieces: list[str] = []
    inner: list[tuple[str, str]] = []
    is_text = depth >= _MOST_DEPTH or schema.get("type") == "string"
    marks = tag.closes if is_text else tag.marks
    properties, items = (schema.get(name) for name in ("properties", "items"))
    while (found := (yield from _until_close(source, tag, marks, key, kept_in(pieces)))) is not None:
        if found.mark == tag.close:
            return _joined(inner, "".join(pieces), schema)
        name = found.groups["key"].strip()
        each = properties.get(name) if isinstance(properties, Mapping) else items
        value = yield from _element(source, tag, name, each if isinstance(each, Mapping) else {}, depth + 1)
        if value is None:
            return None
        inner.append((name, value))
    return None


def _joined(inner: list[tuple[str, str]], text: str, schema: Mapping[str, Any]) -> str:
    """Return the JSON of tags: a list of `item`, or an object; without tags the JSON of the text."""
    kind = schema.get("type")
    if not inner and kind == "string":
        return json.dumps(text, ensure_ascii=False)
    if not inner and (kind not in ("array", "object") or text.strip()):
        return typed(text, schema)
    if kind == "array" or (kind != "object" and all(key == "item" for key, _ in inner)):
        return f"[{', '.join(value for _, value in inner)}]"
    values: dict[str, list[str]] = {}
    for key, value in inner:
        values.setdefault(key, []).append(value)
    # a key that comes again has the list of its values
    parts = ((key, each[0] if len(each) == 1 else f"[{', '.join(each)}]") for key, each in values.items())
    return f"{{{', '.join(f'{json.dumps(key, ensure_ascii=False)}: {value}' for key, value in parts)}}}"


def _read_pythonic(source: Source, form: CallFormat, writer: CallWriter, found: Found | None) -> Reading[None]:
    """Read calls as Python writes them, in a list where nothing else separates them."""
    if not form.separator:
        if (yield from source.peek()) != "[":
            raise Malformed
        source.at += 1
    num_before = writer.num_calls
    while (char := (yield from source.peek())) != "]" or writer.num_calls == num_before or form.separator:
        if char == "," and writer.num_calls > num_before:
            source.at += 1
            continue
        name = yield from source.word(_NAME, MOST_NAME)
        if not name or (yield from source.peek()) != "(" or (form.is_bare and name not in writer.tools):
            if writer.num_calls > num_before:
                return
            raise Malformed
        source.at += 1
        yield writer.begin(name)
        try:
            yield from _read_keywords(source, writer, name)
        except Malformed:
            yield writer.end(is_cut=True)
            return
        yield writer.end()
    source.at += 1


def _read_keywords(source: Source, writer: CallWriter, name: str) -> Reading[None]:
    joint = "{"
    while (char := (yield from source.peek())) != ")":
        if char == ",":
            source.at += 1
            continue
        key = (yield from source.word(_KEY, _MOST_KEY)).strip()
        if not key or (yield from source.peek()) != "=":
            raise Malformed
        source.at += 1
        yield from source.peek()
        value = typed((yield from _python_value(source)), writer.schema(name, key))
        yield from writer.piece(f"{joint}{json.dumps(key, ensure_ascii=False)}: {value}")
        joint = ", "
    source.at += 1
    yield from writer.piece("{}" if joint == "{" else "}")


def _python_value(source: Source) -> Reading[str]:
    """Return the text up to the comma or the bracket that ends a value."""
    pieces: list[str] = []
    depth = 0
    while True:
        pieces.append(source.take(_OUTSIDE))
        char = source.text[source.at : source.at + 1]
        if not char:
            if source.is_last:
                raise Malformed
            yield None
            continue
        if depth == 0 and char in ",)":
            return "".join(pieces)
        source.at += 1
        pieces.append(char)
        if char in "'\"":
            yield from source.string(kept_in(pieces), char)
        depth += _PAIRS.get(char, 0)


def _value(source: Source) -> Reading[str]:
    """Return the JSON value that begins here, as it is written."""
    if source.at >= len(source.text):
        raise Malformed
    pieces: list[str] = []
    yield from source.json(kept_in(pieces))
    return "".join(pieces)


def _object_in(text: str) -> str:
    """Return arguments as JSON where a model writes them as a text with JSON, or null."""
    if text.startswith('"'):
        return decoded(text)
    return "{}" if text == "null" else text


READERS: Final[Mapping[Content, Reader]] = {
    "json": _read_arguments,
    "call": _read_calls,
    "tags": _read_tags,
    "pythonic": _read_pythonic,
    "lax": _read_arguments,
}
