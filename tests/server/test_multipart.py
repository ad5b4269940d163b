"""Forms with files: what clients send is read, and what is none is refused."""

from __future__ import annotations

import pytest

from octavo.errors import InvalidRequest
from octavo.server.multipart import MAX_PARTS, Form, read_form

TYPE = "multipart/form-data; boundary=xyz"


def form(*parts: tuple[str, bytes], end: bytes = b"--xyz--\r\n") -> bytes:
    return b"".join(b"--xyz\r\n%s\r\n\r\n%s\r\n" % (head.encode(), content) for head, content in parts) + end


def field(name: str, content: bytes, more: str = "") -> tuple[str, bytes]:
    return f'Content-Disposition: form-data; name="{name}"{more}', content


def test_fields_and_files_come_back_as_they_were_sent() -> None:
    content = bytes(range(256)) * 20 + b"\r\n--xy\r\n\r\n--"
    body = b"preamble\r\n" + form(
        field("model", b"whisper"),
        field("timestamp_granularities[]", b"segment"),
        field("timestamp_granularities[]", "wörd".encode()),
        field("file", content, '; filename="a.wav"\r\nContent-Type: audio/wav'),
    )
    fields = {"model": ["whisper"], "timestamp_granularities": ["segment", "wörd"]}
    assert read_form(TYPE, body) == Form(fields, {"file": content})
    assert read_form('multipart/form-data; boundary="xyz"', form()) == Form({}, {})


@pytest.mark.parametrize(
    ("content_type", "body", "message"),
    [
        ("multipart/form-data", form(), "names no boundary"),
        ("multipart/form-data; boundary=" + "x" * 71, form(), "names no boundary"),
        (TYPE, b"", "breaks off before its last boundary"),
        (TYPE, form(field("a", b"1"), end=b""), "breaks off before its last boundary"),
        (TYPE, form(("Content-Type: text/plain", b"1")), "no Content-Disposition: form-data with a name"),
        (TYPE, b"--xyz\r\nContent-Disposition: form-data; name=a\r\n--xyz--", "a part has no headers"),
        (TYPE, form((f"X-A: {'a' * 5000}", b"1")), "a part has no headers of at most 4,096 bytes"),
        (TYPE, form(*[field("a", b"1")] * (MAX_PARTS + 1)), "it has more than 64 parts"),
        (TYPE, form(field("a", b"\xff")), "a is not UTF-8 text"),
        (TYPE, form(field("a", bytes((1 << 20) + 1))), "a has more than 1,048,576 bytes"),
        (TYPE, form(*[field("f", b"", "; filename=x")] * 2), "f comes twice"),
    ],
)
def test_what_is_no_form_is_refused(content_type: str, body: bytes, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        read_form(content_type, body)
