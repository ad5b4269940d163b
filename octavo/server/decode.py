"""Decodes the bytes of a request into a checked struct; every error names the field and what was expected."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Final, TypeVar, get_type_hints

import msgspec
from msgspec import Meta, inspect
from starlette.requests import ClientDisconnect, Request

from octavo.core.request_limits import REQUEST_LIMITS, check_chars, check_field
from octavo.errors import InvalidRequest, suggestion
from octavo.server.checks import check_json
from octavo.server.errors import ClientDisconnectedError

Int = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]
RequestId = Annotated[str, Meta(pattern=r"^[!-~]{1,128}$")]
"""1 to 128 visible ASCII characters: it travels in a header too."""


class RequestBody(msgspec.Struct):
    """The body of a request. Its lists and texts are limited by field name, as in `REQUEST_LIMITS`."""

    def check(self) -> None:
        """Raise InvalidRequest for fields that are too long, or that contradict each other."""
        for name in _limited_fields(type(self)):
            value = getattr(self, name)
            # prompts and messages are measured piece by piece; token ids are limited by the context
            if value is not None and (name not in ("prompt", "messages") or isinstance(value, str)):
                check_field(name, msgspec.to_builtins(value) if isinstance(value, list | msgspec.Struct) else value)
        num_chars = 0
        for field, messages in self.conversations().items():
            check_field("messages", messages, field)
            num_chars += sum(message.check(f"{field}[{index}]") for index, message in enumerate(messages))
        check_chars("messages", num_chars, REQUEST_LIMITS["messages"].total_chars, " together")

    def conversations(self) -> Mapping[str, Sequence[Any]]:
        """Return the messages of each conversation, by the name of its field."""
        return {"messages": getattr(self, "messages", None) or ()}

    @property
    def may_take_long(self) -> bool:
        """Return whether making its prompts may take long although the body is short. Raises InvalidRequest."""
        is_program = getattr(self, "chat_template", None) is not None
        return is_program or any(each.has_images for messages in self.conversations().values() for each in messages)


_SALT: Final = "Only requests with the same salt share cached prefixes."
_PRIORITY: Final = "Smaller numbers go first, under the scheduling policy priority."
_DEADLINE: Final = "Seconds in which the first token is due; refused where that cannot be."


class EngineBody(RequestBody, kw_only=True):
    """Fields that the bodies of all requests to the engine have. lists_prompts: several prompts are the entries of one
    field."""

    lists_prompts: ClassVar[bool] = True

    model: str | None = None
    cache_salt: Annotated[str, Meta(description=_SALT)] | None = None
    priority: Annotated[Int, Meta(description=_PRIORITY)] | None = None
    first_token_deadline_s: Annotated[float, Meta(description=_DEADLINE)] | None = None
    request_id: RequestId | None = None
    user: str | None = None


@functools.cache
def _limited_fields(kind: type[RequestBody]) -> list[str]:
    return [name for name in kind.__struct_fields__ if name in REQUEST_LIMITS]


T = TypeVar("T", bound=RequestBody)
S = TypeVar("S", bound=msgspec.Struct)

_PATH = re.compile(r"^(?P<what>.*?)(?: - at (?:`key` in )?`\$(?P<path>[^`]*)`)?\Z", re.DOTALL)
_STEP = re.compile(r"[^.\[\]]+|\[[^\]]*\]")
_INVALID = re.compile("^Invalid (enum )?value ")
_UNKNOWN = re.compile(r"Object contains unknown field `(.*?)`?\Z", re.DOTALL)
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_LONE = re.compile("[\ud800-\udfff]")
_LONGEST_QUOTE = 200
_MOST_LISTED = 8
"""Number of known fields that the error about an unknown field of a nested object lists."""
_MOST_CONTAINERS = 1 << 19
_MOST_ITEMS = 8 << 20
_MISSING = re.compile(r"Object missing required field `(.*)`")


class Refused(msgspec.Struct, frozen=True):
    """Annotates a field that is known but not supported. `harmless` values, like null, mean the same as leaving the
    field out."""

    because: str
    harmless: tuple[Any, ...] = ()


@functools.cache
def decoder(kind: type[T]) -> msgspec.json.Decoder[T]:
    """Return the decoder of a struct; making it takes a hundred times longer than using it."""
    return msgspec.json.Decoder(kind)


@functools.cache
def refused_fields(kind: type[msgspec.Struct]) -> dict[str, Refused]:
    hints = get_type_hints(kind, include_extras=True)
    return {
        name: mark
        for name in kind.__struct_fields__
        for mark in getattr(hints[name], "__metadata__", ())
        if isinstance(mark, Refused)
    }


async def read_body(request: Request) -> list[bytes]:
    """Return the pieces of the body of a request that is declared as JSON. Raises ApiError 413 and 415."""
    check_json(request.headers.get("content-type", "").encode("latin-1"))
    return await read_pieces(request)


async def read_json(request: Request, kind: type[T]) -> T:
    """Return the body of a request as a checked struct. Raises ApiError and InvalidRequest."""
    return decode(b"".join(await read_body(request)), kind)


async def read_optional_json(request: Request, kind: type[T]) -> T:
    """Return the body of a request as a checked struct; without a body, a struct of defaults. Raises as `read_json`."""
    body = b"".join(await read_pieces(request))
    if not body:
        return kind()
    check_json(request.headers.get("content-type", "").encode("latin-1"))
    return decode(body, kind)


async def read_pieces(request: Request) -> list[bytes]:
    """Return the pieces of the body of a request. Raises ApiError 413."""
    try:
        return [piece async for piece in request.stream() if piece]
    except ClientDisconnect as error:
        raise ClientDisconnectedError from error


def decode(body: bytes, kind: type[T]) -> T:
    """Return a checked struct of this kind from JSON. Raises InvalidRequest for anything that does not fit."""
    num_containers = body.count(b"[") + body.count(b"{")
    if num_containers > _MOST_CONTAINERS or body.count(b",") > _MOST_ITEMS:
        # each takes far more memory than its bytes in the JSON
        raise InvalidRequest(
            f"the body has more than {_MOST_CONTAINERS:,} brackets or {_MOST_ITEMS:,} commas; send several requests",
            code="request_too_large",
        )
    try:
        value: T = decoder(kind).decode(body)
    except msgspec.ValidationError as error:
        raise _misfit(str(error), kind) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _malformed(str(error), body) from error
    except RecursionError as error:
        raise InvalidRequest("the body nests arrays or objects too deeply", code="invalid_json") from error
    refuse_unsupported(value)
    value.check()
    return value


def converted(value: Any, kind: type[S], field: str = "", *, strict: bool = True) -> S:
    """Return a struct of this kind from decoded JSON, which the client knows as `field`. Raises InvalidRequest.

    strict: numbers and booleans must not be texts; in a form they are.
    """
    try:
        result = msgspec.convert(value, kind, strict=strict)
    except msgspec.ValidationError as error:
        raise _misfit(str(error), kind, field) from error
    refuse_unsupported(result, f"{field}." if field else "")
    return result


def query_of(request: Request, kind: type[S]) -> S:
    """Return the parameters in the URL of a request. Raises InvalidRequest for unknown, repeated and wrong ones."""
    lists = {field.name for field in msgspec.structs.fields(kind) if "list" in str(field.type)}
    given: dict[str, Any] = {}
    for name, value in request.query_params.multi_items():
        if name not in kind.__struct_fields__:
            names = kind.__struct_fields__
            known = f"known are {', '.join(names)}" if names else "there are none here"
            raise InvalidRequest(
                f"{name:.60} is not a known parameter of the URL; {known}{suggestion(name, names)}",
                field=name[:_LONGEST_QUOTE],
                code="unknown_parameter",
            )
        if name in lists:
            given.setdefault(name, []).append(value)
        elif given.setdefault(name, value) != value:
            raise InvalidRequest(f"{name} is in the URL twice; give it once", field=name)
    return converted(given, kind, strict=False)


def refuse_unsupported(value: msgspec.Struct, prefix: str = "") -> None:
    """Raise InvalidRequest when an unsupported field has a value other than null and its harmless ones."""
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
    if "utf-8" in message.lower():  # said by Python's decoder, or since msgspec 0.23 by its own
        return InvalidRequest("the body is not UTF-8 text; encode it as UTF-8", code="invalid_json")
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


def _misfit(message: str, kind: type[msgspec.Struct], prefix: str = "") -> InvalidRequest:
    match = _PATH.match(message)
    assert match is not None
    what, path = match["what"][:_LONGEST_QUOTE], (match["path"] or "").removeprefix(".")
    steps, root = _STEP.findall(path), inspect.type_info(kind)
    path = f"{prefix}.{path}".strip(".")
    structs = [t for t in _types_at(root, steps) if isinstance(t, inspect.StructType)]
    if unknown := _UNKNOWN.match(what):
        known = [name for struct in structs for name in struct.cls.__struct_encode_fields__]
        refused = {name for struct in structs for name in refused_fields(struct.cls)}
        taken = [name for name in dict.fromkeys(known) if name not in refused]
        near = suggestion(unknown[1], taken)
        if path and not near and len(taken) <= _MOST_LISTED:
            near = f"; {path} has {', '.join(taken)}"
        field = f"{path}.{unknown[1]}".removeprefix(".")
        return InvalidRequest(f"{field} is not a known field{near}", field=field, code="unknown_parameter")
    if missing := _MISSING.fullmatch(what):
        field = f"{path}.{missing[1]}".removeprefix(".")
        return InvalidRequest(f"{field} is missing", field=field, code="missing_required_parameter")
    if values := _values_at(root, steps, what):
        what = f"{_INVALID.sub('', what)} is not one of {', '.join(map(str, values))}"
    else:
        what = what[:1].lower() + what[1:]
    # the message about a value of the right type that is outside its limits does not quote it
    code = "invalid_type" if ", got `" in what else "invalid_value"
    return InvalidRequest(f"{path or 'the body'}: {what}", field=path or None, code=code)


def _values_at(root: inspect.Type, steps: Sequence[str], what: str) -> list[Any]:
    """Return the allowed values when msgspec's message `what` is about a wrong choice; an empty list for other
    messages."""
    if what.startswith("Invalid enum value"):
        return [value for t in _types_at(root, steps) if isinstance(t, inspect.LiteralType) for value in t.values]
    if what.startswith("Invalid value") and steps and steps[-1].endswith("type"):
        return sorted(t.tag for t in _types_at(root, steps[:-1]) if isinstance(t, inspect.StructType))
    return []


def _types_at(kind: inspect.Type, steps: Sequence[str]) -> Iterator[inspect.Type]:
    """Yield the types that the schema allows at a path of field names and `[…]` (any entry) within a value of type
    `kind`."""
    if isinstance(kind, inspect.UnionType):
        for inner in kind.types:
            yield from _types_at(inner, steps)
    elif isinstance(kind, inspect.Metadata):
        yield from _types_at(kind.type, steps)
    elif not steps:
        yield kind
    elif isinstance(kind, inspect.StructType):
        for field in kind.fields:
            if field.name == steps[0]:
                yield from _types_at(field.type, steps[1:])
    elif isinstance(kind, inspect.ListType | inspect.DictType):
        yield from _types_at(kind.item_type if isinstance(kind, inspect.ListType) else kind.value_type, steps[1:])
