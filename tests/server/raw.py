"""HTTP without a client's conveniences, for requests that a client would not send."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit


@dataclass
class Answer:
    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        """The error object; fails when it has not exactly the four keys."""
        body = self.json
        assert set(body) == {"error"}
        assert set(body["error"]) == {"message", "type", "param", "code"}
        return body["error"]


@contextmanager
def connect(url: str) -> Iterator[http.client.HTTPConnection]:
    parts = urlsplit(url)
    assert parts.hostname is not None
    connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=100)
    try:
        yield connection
    finally:
        connection.close()


def ask(
    url: str,
    path: str,
    body: Any = None,
    *,
    method: str | None = None,
    headers: Mapping[str, str] | None = None,
    chunked: bool = False,
) -> Answer:
    """GET, or POST when there is a body: bytes as they are, anything else as JSON."""
    with connect(url) as connection:
        data = body if body is None or isinstance(body, bytes | Iterator) else json.dumps(body).encode()
        fields = {"Content-Type": "application/json"} if body is not None else {}
        method = method or ("GET" if body is None else "POST")
        connection.request(method, path, data, {**fields, **(headers or {})}, encode_chunked=chunked)
        response = connection.getresponse()
        content = response.read()
        return Answer(response.status, {name.lower(): value for name, value in response.getheaders()}, content)


class EventReader:
    """The server-sent events of a path as they come. last_id: the id of the last one."""

    def __init__(self, url: str, path: str, headers: Mapping[str, str]) -> None:
        parts = urlsplit(url)
        self._connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=100)
        self._connection.request("GET", path, headers=headers)
        self.response = self._connection.getresponse()
        self.last_id = ""

    def next(self) -> dict[str, Any]:
        """The data of the next event; fails at the end of the stream."""
        while True:
            line = self.response.readline()
            assert line, "the stream has ended"
            if line.startswith(b"id: "):
                self.last_id = line[4:].decode().strip()
            if line.startswith(b"data: "):
                return dict(json.loads(line[6:]))

    def close(self) -> None:
        self._connection.close()


def events(content: bytes) -> list[Any]:
    """The data of server-sent events, decoded where they are JSON."""
    found = []
    for block in content.decode().split("\n\n"):
        if block:
            if block.startswith("event: "):
                name, _, block = block.partition("\n")
                assert f'"type":"{name.removeprefix("event: ")}"' in block
            assert block.startswith("data: ")
            text = block.removeprefix("data: ")
            found.append(text if text == "[DONE]" else json.loads(text))
    return found


def eventually(condition: Callable[[], object], timeout_s: float = 200.0) -> None:
    """Wait until the condition holds. Fails when it does not in a time that machines with much else to do need, too."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "did not come true in time"
        time.sleep(0.005)
