"""A server of the OpenAI API on a local port that says what it is told to."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from typing import Any

from tests.fakes.http_server import serving


@dataclass
class FakeOpenAI:
    """`pages`: bodies of GET by path. `reply`: events for the body of a POST; a number in their place is a status,
    bytes are data as they stand, and None cuts the connection."""

    reply: Callable[[dict[str, Any]], list[Any]] = lambda body: []
    pages: dict[str, str] = field(default_factory=lambda: {"/v1/models": '{"data": [{"id": "fake"}]}'})
    requests: list[dict[str, Any]] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)
    port: int = 0


def completion(*texts: str, prompt_tokens: int = 7) -> list[Any]:
    """The events of a completion with these pieces, a token each."""
    usage = {"prompt_tokens": prompt_tokens, "completion_tokens": len(texts)}
    return [*({"choices": [{"text": text}]} for text in texts), {"choices": [], "usage": usage}]


def chat(*texts: str) -> list[Any]:
    """The events of a chat completion with these pieces."""
    return [{"choices": [{"delta": {"content": text}}]} for text in texts]


@contextmanager
def serve_openai(fake: FakeOpenAI) -> Iterator[FakeOpenAI]:
    """Serve it on a free local port."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            fake.keys.append(self.headers.get("Authorization"))
            body = fake.pages.get(self.path)
            self.send(200 if body is not None else 404, (body or '{"detail": "Not Found"}').encode())

        def do_POST(self) -> None:
            fake.keys.append(self.headers.get("Authorization"))
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            fake.requests.append(body)
            events = fake.reply(body)
            if events and isinstance(events[0], int):
                self.send(events[0], b'{"error": {"message": "refused \\u001b[2J"}}')
                return
            self.send_response(200)
            self.end_headers()
            for event in events:
                if event is None:
                    return
                data = event if isinstance(event, bytes) else json.dumps(event).encode()
                self.wfile.write(b"data: " + data + b"\n\n")
            self.wfile.write(b"data: [DONE]\n\n")

        def send(self, status: int, body: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    with serving(Handler) as fake.port:
        yield fake
