"""From the bytes of a request to a checked struct; every error names the field and what was expected."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterator
from typing import Any, TypeVar, get_type_hints

import msgspec
from msgspec import inspect
from starlette.requests import ClientDisconnect, Request

from octavo.errors import InvalidRequest, suggestion
from octavo.server.checks import not_json
from octavo.server.errors import ClientDisconnectedError


class RequestBody(msgspec.Struct):
    """The body of a request."""

    def check(self) -> None:
        """Raise InvalidRequest for fields that are too long or contradict each other."""
        raise NotImplementedError


T = TypeVar("T", bound=RequestBody)

_PATH = re.compile(r"^(?P<what>.*?)(?: - at (?:`key` in )?`\$(?P<path>[^`]*)`)?\Z", re.DOTALL)
_STEP = re.compile(r"\.([^.\[\]]+)|\[[^\]]*\]")
_UNKNOWN = re.compile(r"Object contains unknown field `(.*?)`?\Z", re.DOTALL)
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_LONE = re.compile("[\ud800-\udfff]")
_LONGEST_QUOTE = 200
_MOST_CONTAINERS = 1 << 19
_MOST_ITEMS = 8 << 20
_MISSING = re.compile(r"Object missing required field `(.*)`")


class Refused(msgspec.Struct, frozen=True):
    """Annotates a field that is known but not supported. `harmless` values, like null, mean the same as none."""

    because: str
    harmless: tuple[Any, ...] = ()


@functools.cache
def decoder(kind: type[T]) -> msgspec.json.Decoder[T]:
    """Return the decoder of a struct; making it takes a hundred times longer than using it."""
    return msgspec.json.Decoder(kind)


@functools.cache
def refused_fields(kind: type[msgspec.Struct]) -> dict[str, Refused]:
    """Return the fields of a struct that are known but not supported."""
    hints = get_type_hints(kind, include_extras=True)
    return {
        name: mark
        for name in kind.__struct_fields__
        for mark in getattr(hints[name], "__metadata__", ())
        if isinstance(mark, Refused)
    }


async def read_body(request: Request) -> list[bytes]:
    """Return the pieces of the body of a request that is declared as JSON. Raises ApiError 413 and 415."""
    if (refusal := not_json(request.headers.get("content-type", "").encode("latin-1"))) is not None:
        raise refusal
    try:
        return [piece async for piece in request.stream() if piece]
    except ClientDisconnect as error:
        raise ClientDisconnectedError from error


def decode(body: bytes, kind: type[T]) -> T:
    """Return a checked struct of this kind from JSON. Raises InvalidRequest for anything that does not fit."""
    num_containers = body.count(b"[") + body.count(b"{")
    if num_containers > _MOST_CONTAINERS or body.count(b",") > _MOST_ITEMS:
        # each takes far more memory than the bytes that it is written with
        raise InvalidRequest(
            f"the body has more than {_MOST_CONTAINERS:,} brackets or {_MOST_ITEMS:,} commas; send several requests",
            code="request_too_large",
        )
    try:
        value: T = decoder(kind).decode(body)
    except msgspec.ValidationError as error:
        raise _misfit(str(error), kind) from error
    except msgspec.DecodeError as error:
        raise _malformed(str(error), body) from error
    except UnicodeDecodeError as error:
        raise InvalidRequest("the body is not UTF-8 text; encode it as UTF-8", code="invalid_json") from error
    except RecursionError as error:
        raise InvalidRequest("the body nests arrays or objects too deeply", code="invalid_json") from error
    refuse_unsupported(value)
    value.check()
    return value


def refuse_unsupported(value: msgspec.Struct, prefix: str = "") -> None:
    """Raise InvalidRequest when a field that is not supported has a value that would matter."""
    for name, mark in refused_fields(type(value)).items():
        given = getattr(value, name)
        if given is not None and not any(
            given == harmless and type(given) is type(harmless) for harmless in mark.harmless
        ):
            field = f"{prefix}{name}"
            raise InvalidRequest(f"{field} is not supported: {mark.because}", field=field, code="unsupported_parameter")


def _malformed(message: str, body: bytes) -> InvalidRequest:
    if not body:
        return InvalidRequest("the body is empty; send a JSON object", code="invalid_json")
    if _SURROGATE.search(body) and (path := _path_of_surrogate(body)) is not None:
        return InvalidRequest(
            f"{path} is no valid Unicode text: it has a lone surrogate (\\ud800 to \\udfff); send both halves of the "
            "pair, or the character itself",
            field=path,
        )
    if message == "Input data was truncated":
        message = f"JSON is malformed: it breaks off (byte {len(body)})"
    return InvalidRequest(f"the body is not JSON: {message.removeprefix('JSON is malformed: ')}", code="invalid_json")


def _path_of_surrogate(body: bytes) -> str | None:
    """Return the path of the first text with a lone surrogate; None where the JSON has other faults as well."""
    try:
        pending: list[tuple[str, Any]] = [("", json.loads(body))]
    except (ValueError, RecursionError):
        return None
    while pending:
        path, value = pending.pop()
        if isinstance(value, str) and _LONE.search(value):
            return path
        if isinstance(value, dict):
            if any(_LONE.search(key) for key in value):
                return path or None
            pending += [(f"{path}.{key}".removeprefix("."), each) for key, each in reversed(value.items())]
        elif isinstance(value, list):
            pending += [(f"{path}[{index}]", value[index]) for index in reversed(range(len(value)))]
    return None


def _misfit(message: str, kind: type[msgspec.Struct]) -> InvalidRequest:
    match = _PATH.match(message)
    assert match is not None
    what, path = match["what"][:_LONGEST_QUOTE], (match["path"] or "").removeprefix(".")
    if unknown := _UNKNOWN.match(what):
        name = unknown[1]
        near = suggestion(name, _field_names(kind, path))
        field = f"{path}.{name}" if path else name
        return InvalidRequest(f"{field} is not a known field{near}", field=field, code="unknown_parameter")
    if missing := _MISSING.fullmatch(what):
        field = f"{path}.{missing[1]}" if path else missing[1]
        return InvalidRequest(f"{field} is missing", field=field, code="missing_required_parameter")
    if what.startswith("Invalid enum value") and (values := _choices(kind, path)):
        what = f"{what.removeprefix('Invalid enum value ')} is not one of {', '.join(values)}"
    elif what.startswith("Invalid value") and path.endswith("type"):
        tags = sorted(str(t.tag) for t in _types_at(kind, path.rpartition(".")[0]) if isinstance(t, inspect.StructType))
        what = f"{what.removeprefix('Invalid value ')} is not one of {', '.join(tags)}"
    else:
        what = what[:1].lower() + what[1:]
    # the message about a value of the right type that is outside its limits does not quote it
    code = "invalid_type" if ", got `" in what else "invalid_value"
    return InvalidRequest(f"{path or 'the body'}: {what}", field=path or None, code=code)


def _field_names(kind: type[msgspec.Struct], path: str) -> list[str]:
    return [field.name for t in _types_at(kind, path) if isinstance(t, inspect.StructType) for field in t.fields]


def _choices(kind: type[msgspec.Struct], path: str) -> list[str]:
    return [str(value) for t in _types_at(kind, path) if isinstance(t, inspect.LiteralType) for value in t.values]


def _types_at(kind: type[msgspec.Struct], path: str) -> list[inspect.Type]:
    """Return the types that a value at a path such as `messages[0].content` may have."""
    types = list(_alternatives(inspect.type_info(kind)))
    for step in _STEP.finditer(f".{path}" if path else ""):
        types = [inner for t in types for outer in _inside(t, step[1]) for inner in _alternatives(outer)]
    return types


def _alternatives(kind: inspect.Type) -> Iterator[inspect.Type]:
    if isinstance(kind, inspect.UnionType):
        for inner in kind.types:
            yield from _alternatives(inner)
    elif isinstance(kind, inspect.Metadata):
        yield from _alternatives(kind.type)
    else:
        yield kind


def _inside(kind: inspect.Type, name: str | None) -> Iterator[inspect.Type]:
    if name is None and isinstance(kind, inspect.ListType):
        yield kind.item_type
    elif name is None and isinstance(kind, inspect.DictType):
        yield kind.value_type
    elif name is not None and isinstance(kind, inspect.StructType):
        yield from (field.type for field in kind.fields if field.name == name)
