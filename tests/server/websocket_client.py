"""A client of WebSockets that also sends what no other client would."""

from __future__ import annotations

import json
import socket
import ssl
from base64 import b64encode
from typing import Any
from urllib.parse import urlsplit

from websockets.frames import Frame, Opcode

HANDSHAKE = {
    "Connection": "Upgrade",
    "Upgrade": "websocket",
    "Sec-WebSocket-Version": "13",
    "Sec-WebSocket-Key": b64encode(bytes(16)).decode(),
}


def of_client(kind: int, data: bytes, *, last: bool = True) -> bytes:
    """A frame as clients send it."""
    return Frame(Opcode(kind), data, last).serialize(mask=True)


class WebSocketClient:
    """A connection from the handshake on. `status` and `head` are those of the response to it."""

    def __init__(
        self, url: str, path: str = "/v1/realtime", *, tls: ssl.SSLContext | None = None, **headers: str
    ) -> None:
        parts = urlsplit(url)
        self.socket = socket.create_connection((parts.hostname, parts.port), timeout=60)
        if tls is not None:
            self.socket = tls.wrap_socket(self.socket, server_hostname=parts.hostname)
        given = {"Host": parts.netloc, **HANDSHAKE, **{name.replace("_", "-"): headers[name] for name in headers}}
        lines = "".join(f"{name}: {value}\r\n" for name, value in given.items())
        self.socket.sendall(f"GET {path} HTTP/1.1\r\n{lines}\r\n".encode())
        self.file = self.socket.makefile("rb")
        self.head = b"".join(iter(self.file.readline, b"\r\n")).decode()
        self.status = int(self.head.split()[1])
        self.closed_with: int | None = None

    def __enter__(self) -> WebSocketClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()
        self.socket.close()

    def send_frame(self, kind: int, data: bytes, *, last: bool = True) -> None:
        self.socket.sendall(of_client(kind, data, last=last))

    def send(self, event: Any) -> None:
        self.send_frame(1, event if isinstance(event, bytes) else json.dumps(event).encode())

    def append(self, samples: bytes) -> None:
        self.send({"type": "input_audio_buffer.append", "audio": b64encode(samples).decode()})

    def commit(self, **fields: Any) -> None:
        self.send({"type": "input_audio_buffer.commit", **fields})

    def frame(self) -> tuple[int, bytes]:
        """The kind and the data of the next frame."""
        kind, size = self.file.read(2)
        if size >= 126:
            size = int.from_bytes(self.file.read(2 if size == 126 else 8), "big")
        return kind & 15, self.file.read(size)

    def next(self) -> dict[str, Any] | None:
        """The next event, without its id; None at the end."""
        while (frame := self.frame())[0] == 9:
            self.send_frame(10, frame[1])
        if frame[0] == 8:
            self.closed_with = int.from_bytes(frame[1][:2], "big")
            return None
        found: dict[str, Any] = json.loads(frame[1])
        assert found.pop("event_id").startswith("event-")
        return found

    def until(self, kind: str) -> list[dict[str, Any]]:
        """The events up to one of this kind, without deltas."""
        found: list[dict[str, Any]] = []
        while not found or found[-1]["type"] != kind:
            event = self.next()
            assert event is not None, found
            found += [] if event["type"].endswith(".delta") else [event]
        return found
