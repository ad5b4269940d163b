"""Reads forms with files (`multipart/form-data`) from a body in one piece, whose size was checked before, and writes
forms with one sound."""

from __future__ import annotations

import re
from collections.abc import Iterable
from email.message import Message
from email.parser import HeaderParser
from typing import Final

import msgspec

from octavo.errors import InvalidRequest

MAX_PARTS: Final = 64
MAX_HEADER_BYTES: Final = 4096
MAX_FIELD_BYTES: Final = 1 << 20
_BOUNDARY: Final = re.compile(r"[!-~ ]{0,69}[!-~]")


class Form(msgspec.Struct, frozen=True):
    """The texts of each field, by its name without `[]`, and the content of each file."""

    fields: dict[str, list[str]]
    files: dict[str, bytes]


def is_form(content_type: bytes) -> bool:
    """Return whether a body of this type is a form with files."""
    return content_type.partition(b";")[0].strip().lower() == b"multipart/form-data"


def read_form(content_type: str, body: bytes) -> Form:
    """Return a form. Raises InvalidRequest for a body that is incomplete or no form."""
    header = Message()
    header["Content-Type"] = content_type
    boundary = header.get_param("boundary")
    if not isinstance(boundary, str) or _BOUNDARY.fullmatch(boundary) is None:
        raise _malformed("Content-Type names no boundary of 1 to 70 characters")
    pieces = (b"\r\n" + body).split(b"\r\n--" + boundary.encode(), MAX_PARTS + 1)
    if len(pieces) > MAX_PARTS + 1:
        raise _malformed(f"it has more than {MAX_PARTS} parts")
    form = Form({}, {})
    for piece in pieces[1:]:
        if piece.startswith(b"--"):
            return form
        _read_part(piece, form)
    raise _malformed("it breaks off before its last boundary")


def form_head(boundary: str, fields: Iterable[tuple[str, str]]) -> bytes:
    """Return a form up to the content of its file, which `form_tail` follows."""
    head = f"--{boundary}\r\nContent-Disposition: form-data; name="
    parts = [f"{head}{msgspec.json.encode(name).decode()}\r\n\r\n{text}\r\n" for name, text in fields]
    return "".join([*parts, f'{head}"file"; filename="sound"\r\n\r\n']).encode()


def form_tail(boundary: str) -> bytes:
    return f"\r\n--{boundary}--\r\n".encode()


def _read_part(piece: bytes, form: Form) -> None:
    head, separator, content = piece.partition(b"\r\n\r\n")
    if not separator or len(head) > MAX_HEADER_BYTES:
        raise _malformed(f"a part has no headers of at most {MAX_HEADER_BYTES:,} bytes")
    headers = HeaderParser().parsestr(head.decode("utf-8", "replace").lstrip())
    name = headers.get_param("name", header="content-disposition")
    if headers.get_content_disposition() != "form-data" or not isinstance(name, str):
        raise _malformed("a part has no Content-Disposition: form-data with a name")
    name = name.removesuffix("[]")
    if headers.get_param("filename", header="content-disposition") is not None:
        if name in form.files:
            raise InvalidRequest(f"{name} comes twice; send one file", field=name)
        form.files[name] = content
        return
    if len(content) > MAX_FIELD_BYTES:
        raise InvalidRequest(f"{name} has more than {MAX_FIELD_BYTES:,} bytes; shorten it", field=name)
    try:
        form.fields.setdefault(name, []).append(content.decode())
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"{name} is not UTF-8 text; encode it as UTF-8", field=name) from error


def _malformed(reason: str) -> InvalidRequest:
    return InvalidRequest(f"the body is no multipart/form-data: {reason}", code="invalid_form")
