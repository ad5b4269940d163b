"""WebSockets: what a client may do with them over a real connection."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
from types import SimpleNamespace
from typing import cast

import pytest
from websockets.protocol import State

from octavo.server.http.http_protocol import HttpProtocol
from octavo.server.http.websocket import MOST_MESSAGE_BYTES, TOO_LARGE, WebSocket
from octavo.server.http.websocket_protocol import RaisingProtocol
from tests.server.conftest import Served
from tests.server.raw import ask, eventually
from tests.server.websocket_client import HANDSHAKE, WebSocketClient, of_client

TEXT, CLOSE, PING, PONG = 1, 8, 9, 10
NOT_UNDERSTOOD = 1002


WRONG = {
    "a bit that has no meaning": b"\xc1\x80\0\0\0\0",
    "an unknown kind": b"\x83\x80\0\0\0\0",
    "without a mask": b"\x81\x02hi",
    "a control frame in parts": b"\x09\x80\0\0\0\0",
    "a long control frame": b"\x89\xfe\x00\x7e" + bytes(4 + 126),
}


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
        assert "continuation frame" in (client.next() or {})["error"]


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


def test_a_message_that_is_not_finished_is_no_obstacle_to_an_end(server: Served) -> None:
    with WebSocketClient(server.url) as client:
        client.next()
        client.send_frame(TEXT, b"{", last=False)
        client.send_frame(CLOSE, (1000).to_bytes(2, "big"))
        assert (client.next() or {})["code"] == "invalid_websocket"
        assert client.next() is None
        assert client.file.read() == b""
    eventually(lambda: not server.http._connections._open)


def test_messages_before_an_error_are_answered(server: Served) -> None:
    wrong = of_client(TEXT, b'{"type": "wrong"}')
    with WebSocketClient(server.url) as client:
        client.next()
        client.socket.sendall(wrong * 3 + b"\x83\x80\0\0\0\0" + wrong)
        codes = [(client.next() or {})["code"] for _ in range(4)]
        assert codes == ["unknown_event"] * 3 + ["invalid_websocket"]
        assert client.next() is None


def test_a_server_starts_without_the_package_of_websockets() -> None:
    code = (
        "import sys, octavo.server.serving, octavo.server.app, octavo.server.http.http_protocol, uvicorn\n"
        "uvicorn.Config(None, http='httptools', ws='none', lifespan='off', log_config=None).load()\n"
        "assert 'websockets' not in sys.modules\n"
        "import octavo.server.http.websocket_protocol\n"
        "assert 'websockets' in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


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
        http = SimpleNamespace(flow=flow, transport=transport, websocket=None)
        web = WebSocket(cast(HttpProtocol, http), RaisingProtocol(state=State.OPEN))
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
