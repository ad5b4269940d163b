"""Frames of WebSockets, and what a client may do with them over a real connection."""

from __future__ import annotations

import asyncio
import json
import socket
from types import SimpleNamespace
from typing import cast

import pytest

from octavo.server.http_protocol import HttpProtocol
from octavo.server.websocket import (
    MOST_MESSAGE_BYTES,
    NOT_UNDERSTOOD,
    TOO_LARGE,
    Frame,
    WebSocket,
    WebSocketError,
    frame_of,
    masked,
    take_frame,
)
from tests.server.conftest import Served
from tests.server.raw import ask, eventually
from tests.server.websocket_client import HANDSHAKE, WebSocketClient

TEXT, BINARY, CLOSE, PING, PONG = 1, 2, 8, 9, 10


def of_client(kind: int, data: bytes, mask: bytes = b"\x01\x02\x03\xff") -> bytes:
    """The frame of a server with a mask."""
    whole = bytearray(frame_of(kind, data))
    start = len(whole) - len(data)
    whole[1] |= 0x80
    return bytes(whole[:start]) + mask + masked(data, mask)


@pytest.mark.parametrize("size", [0, 1, 3, 4, 125, 126, 255, 256, 257, 259, 65_535, 65_536])
def test_frames_of_every_size_are_read(size: int) -> None:
    data = bytes(number % 251 for number in range(size))
    buffer = bytearray(of_client(BINARY, data) + b"next")
    assert take_frame(buffer, size) == Frame(BINARY, True, data)
    assert buffer == b"next"


@pytest.mark.parametrize("size", [5, 255, 256, 259])
def test_a_mask_changes_each_byte(size: int) -> None:
    data, mask = bytes(number % 251 for number in range(size)), b"\x37\xfa\x21\x3d"
    assert masked(data, mask) == bytes(byte ^ mask[place % 4] for place, byte in enumerate(data))
    example = bytearray(b"\x81\x85\x37\xfa\x21\x3d\x7f\x9f\x4d\x51\x58")  # of RFC 6455
    assert take_frame(example, 5) == Frame(TEXT, True, b"Hello")


def test_a_frame_is_read_once_its_last_byte_is_there() -> None:
    whole, buffer = of_client(TEXT, b"a" * 300), bytearray()
    for byte in whole[:-1]:
        buffer.append(byte)
        assert take_frame(buffer, 300) is None
    buffer.append(whole[-1])
    assert take_frame(buffer, 300) == Frame(TEXT, True, b"a" * 300)


WRONG = {
    "a bit that has no meaning": b"\xc1\x80\0\0\0\0",
    "an unknown kind": b"\x83\x80\0\0\0\0",
    "without a mask": b"\x81\x02hi",
    "a control frame in parts": b"\x09\x80\0\0\0\0",
    "a long control frame": b"\x89\xfe\x00\x7e",
}


@pytest.mark.parametrize("sent", WRONG.values(), ids=WRONG.keys())
def test_what_is_no_frame_is_an_error(sent: bytes) -> None:
    with pytest.raises(WebSocketError) as error:
        take_frame(bytearray(sent), 1000)
    assert error.value.code == NOT_UNDERSTOOD


def test_a_frame_that_is_too_long_is_refused_at_its_head() -> None:
    with pytest.raises(WebSocketError) as error:
        take_frame(bytearray(of_client(TEXT, bytes(1001))[:4]), 1000)
    assert error.value.code == TOO_LARGE


@pytest.mark.parametrize("sent", WRONG.values(), ids=WRONG.keys())
def test_a_client_learns_why_it_is_closed(sent: bytes, server: Served) -> None:
    with WebSocketClient(server.url) as client:
        assert (client.next() or {})["type"] == "session.created"
        client.socket.sendall(sent)
        assert (client.next() or {})["code"] == "invalid_websocket"
        assert client.next() is None
        assert client.closed_with == NOT_UNDERSTOOD
        assert client.file.read() == b""


def test_messages_come_in_parts_with_pings_between_them(server: Served) -> None:
    whole = json.dumps({"type": "wrong"}).encode()
    with WebSocketClient(server.url) as client:
        client.next()
        client.send_frame(TEXT, whole[:3], last=False)
        client.send_frame(PING, b"there?")
        assert client.frame() == (PONG, b"there?")
        client.send_frame(0, whole[3:5], last=False)
        client.send_frame(0, whole[5:])
        assert (client.next() or {})["code"] == "unknown_event"
        client.send_frame(TEXT, b"{", last=False)
        client.send_frame(TEXT, whole)
        assert "parts of two messages" in (client.next() or {})["error"]


def test_parts_together_have_the_limit_of_a_message(server: Served) -> None:
    with WebSocketClient(server.url) as client:
        client.next()
        client.send(b" " * MOST_MESSAGE_BYTES)
        assert (client.next() or {})["code"] == "invalid_json"
        client.send_frame(TEXT, b" " * MOST_MESSAGE_BYTES, last=False)
        client.send_frame(0, b" ")
        error = client.next() or {}
        assert (error["code"], "1,048,576 bytes" in error["error"]) == ("message_too_large", True)
        assert client.next() is None
        assert client.closed_with == TOO_LARGE


def test_a_close_is_answered_and_the_connection_counts_no_more(server: Served) -> None:
    connections = server.http._connections
    eventually(lambda: not connections._open)
    with WebSocketClient(server.url) as client:
        client.next()
        assert len(connections._open) == 1
        client.send_frame(CLOSE, (1000).to_bytes(2, "big") + b"bye")
        assert client.next() is None
        assert client.closed_with == 1000
    eventually(lambda: not connections._open and not connections._num_per_address)


def test_others_get_their_turn_between_frames_without_data() -> None:
    flow = SimpleNamespace(pause_reading=lambda: None, resume_reading=lambda: None)
    transport = SimpleNamespace(set_protocol=lambda protocol: None, write=lambda data: None)

    async def num_turns() -> int:
        web = WebSocket(cast(HttpProtocol, SimpleNamespace(flow=flow, transport=transport, websocket=None)))
        web.data_received(of_client(PONG, b"") * 6400 + of_client(PING, b"") * 6400 + of_client(TEXT, b"{}"))
        receiving = asyncio.create_task(web.receive())
        count = 0
        while not receiving.done():
            await asyncio.sleep(0)
            count += 1
        assert receiving.result() == b"{}"
        return count

    assert asyncio.run(num_turns()) >= 200


def test_a_client_that_reads_nothing_fills_no_memory(server: Served) -> None:
    """Answers to pings wait for it, and so does what it sends."""
    with WebSocketClient(server.url) as client:
        client.next()
        client.socket.settimeout(2.0)
        with pytest.raises(TimeoutError):
            client.socket.sendall(of_client(PING, bytes(125)) * 1_000_000)  # 131 MB
        (connection,) = server.http._connections._open
        assert connection.transport.get_write_buffer_size() < 1 << 20
        assert isinstance(connection, HttpProtocol)
        assert connection.websocket is not None
        assert len(connection.websocket._buffer) < 1 << 20
        assert not connection.websocket._writable.is_set()
        assert ask(server.url, "/health").status == 200


def test_what_is_no_handshake_is_refused(server: Served) -> None:
    plain = ask(server.url, "/v1/realtime")
    assert (plain.status, plain.error["code"], plain.headers["upgrade"]) == (426, "upgrade_required", "websocket")
    other = ask(server.url, "/v1/realtime", headers={**HANDSHAKE, "Upgrade": "h2c"})
    assert (other.status, other.error["code"]) == (426, "upgrade_required")
    old = ask(server.url, "/v1/realtime", headers={**HANDSHAKE, "Sec-WebSocket-Version": "8"})
    assert (old.status, old.headers["sec-websocket-version"]) == (426, "13")
    for key in ("", "AAAA", "%"):
        wrong = ask(server.url, "/v1/realtime", headers={**HANDSHAKE, "Sec-WebSocket-Key": key})
        assert (wrong.status, "16 bytes" in wrong.error["message"]) == (400, True)
    assert ask(server.url, "/v1/realtime", {}, headers=HANDSHAKE).status == 405


def test_a_request_behind_the_handshake_is_refused(server: Served) -> None:
    lines = "".join(f"{name}: {value}\r\n" for name, value in HANDSHAKE.items())
    handshake = f"GET /v1/realtime HTTP/1.1\r\nHost: localhost\r\n{lines}\r\n"
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        connection.sendall(handshake.encode() + b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert connection.recv(1 << 16).startswith(b"HTTP/1.1 400")
