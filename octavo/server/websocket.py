"""WebSockets (RFC 6455) on connections of the HTTP server: the handshake, frames, and the end.

The request that asks for one passes the checks of any other; its handler makes the connection a WebSocket.
"""

from __future__ import annotations

import asyncio
import binascii
from base64 import b64decode, b64encode
from collections.abc import Callable
from hashlib import sha1
from typing import TYPE_CHECKING, Final, NamedTuple

from octavo.server.checks import Fields
from octavo.server.errors import ApiError, http_date

if TYPE_CHECKING:
    from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

    from octavo.server.http_protocol import HttpProtocol

MOST_MESSAGE_BYTES: Final = 1 << 20
"""Longest message that a client may send, in one frame or several."""
GOING_AWAY, NOT_UNDERSTOOD, TOO_LARGE = 1001, 1002, 1009
"""Codes with which the server closes a WebSocket."""

_MOST_WAITING_BYTES: Final = 256 << 10
"""Received bytes that wait for their reader, besides the rest of a message, before no more are received."""
_FRAMES_OF_TURN: Final = 64
"""Frames that are read before others get the event loop: those without data are small and many."""
_CONTINUED, _TEXT, _BINARY, _CLOSE, _PING, _PONG = 0, 1, 2, 8, 9, 10
_NAMES: Final = frozenset({_CONTINUED, _TEXT, _BINARY, _CLOSE, _PING, _PONG})
_MOST_CONTROL_BYTES: Final = 125
_LAST, _MASKED = 0x80, 0x80
_LEAST_FOR_ARRAYS: Final = 256
"""Bytes from which on numpy takes the mask off sooner than integers do, which take 18 ms for a MiB."""
_VERSION: Final = b"13"
_ACCEPTING: Final = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
"""What RFC 6455 appends to the key of a client."""


class WebSocketError(Exception):
    """What a client has sent is no message of a WebSocket, or too long. code: with which it is to be closed."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


class Frame(NamedTuple):
    """A part of a message, or a control frame."""

    kind: int
    is_last: bool
    data: bytes


def take_frame(buffer: bytearray, most_bytes: int) -> Frame | None:
    """Remove the first frame of a client from a buffer and return it; None while it is not there whole.

    Raises WebSocketError, for data of more than `most_bytes` before they are there.
    """
    if len(buffer) < 2:
        return None
    kind, is_last, size, start = buffer[0] & 0x0F, bool(buffer[0] & _LAST), buffer[1] & 0x7F, 2
    if kind not in _NAMES or buffer[0] & 0x70:
        raise WebSocketError(NOT_UNDERSTOOD, f"a frame begins with the byte {buffer[0]}, which has no meaning here")
    if not buffer[1] & _MASKED:
        raise WebSocketError(NOT_UNDERSTOOD, "a frame is not masked, as those of clients have to be")
    if kind >= _CLOSE and (size > _MOST_CONTROL_BYTES or not is_last):
        raise WebSocketError(NOT_UNDERSTOOD, f"a control frame has parts, or more than {_MOST_CONTROL_BYTES} bytes")
    if size > _MOST_CONTROL_BYTES:  # 126 or 127: the size follows, in 2 or 8 bytes
        start = 4 if size == _MOST_CONTROL_BYTES + 1 else 10
        if len(buffer) < start:
            return None
        size = int.from_bytes(buffer[2:start], "big")
    if size > most_bytes and kind < _CLOSE:
        message = f"a message has more than {MOST_MESSAGE_BYTES:,} bytes; send shorter ones"
        raise WebSocketError(TOO_LARGE, message)
    end = start + 4 + size
    if len(buffer) < end:
        return None
    data = masked(buffer[start + 4 : end], buffer[start : start + 4])
    del buffer[:end]
    return Frame(kind, is_last, data)


def masked(data: bytes | bytearray, mask: bytes | bytearray) -> bytes:
    """Return data with each four bytes xor'd with the mask, which also undoes it."""
    size = len(data)
    if size < _LEAST_FOR_ARRAYS:
        repeated = (mask * (size // 4 + 1))[:size]
        return (int.from_bytes(data, "little") ^ int.from_bytes(repeated, "little")).to_bytes(size, "little")
    import numpy as np

    whole = size - size % 4
    words = np.frombuffer(data, np.uint32, whole // 4) ^ np.frombuffer(mask, np.uint32)
    return words.tobytes() + masked(data[whole:], mask)


def frame_of(kind: int, data: bytes) -> bytes:
    """Return a whole frame of a server."""
    size = len(data)
    if size <= _MOST_CONTROL_BYTES:
        return bytes((kind | _LAST, size)) + data
    head = b"\x7e" + size.to_bytes(2, "big") if size < 1 << 16 else b"\x7f" + size.to_bytes(8, "big")
    return bytes((kind | _LAST,)) + head + data


class Upgrade:
    """Makes a WebSocket of the connection of a request. Requests that name another protocol have it as an extension of
    their scope where this server's own protocol reads them."""

    NAME: Final = "octavo.upgrade"

    def __init__(self, http: HttpProtocol, cycle: RequestResponseCycle) -> None:
        self._http, self._cycle = http, cycle

    def accept(self, fields: Fields, request_id: str, subprotocol: str | None = None) -> WebSocket:
        """Complete the handshake. Raises ApiError for a request that does not begin one."""
        http, cycle, key = self._http, self._cycle, fields.get(b"sec-websocket-key", b"")
        if fields.get(b"upgrade", b"").lower() != b"websocket":
            raise upgrade_required()
        if fields.get(b"sec-websocket-version") != _VERSION:
            raise ApiError(
                426,
                "Sec-WebSocket-Version has to be 13",
                code="upgrade_required",
                headers={"Sec-WebSocket-Version": _VERSION.decode()},
            )
        if not _is_key(key) or cycle.scope["method"] != "GET" or cycle is not http.cycle or cycle.more_body:
            raise ApiError(
                400,
                "the handshake of a WebSocket is a GET without a body, with nothing behind it, and has a "
                "Sec-WebSocket-Key of 16 bytes in base64",
                code="invalid_http",
            )
        headers = {
            b"upgrade": b"websocket",
            b"connection": b"Upgrade",
            b"sec-websocket-accept": b64encode(sha1(key + _ACCEPTING).digest()),
            b"date": http_date(),
            b"x-request-id": request_id.encode(),
        }
        if subprotocol is not None:
            headers[b"sec-websocket-protocol"] = subprotocol.encode("latin-1")
        lines = b"".join(b"%b: %b\r\n" % header for header in headers.items())
        http.transport.write(b"HTTP/1.1 101 Switching Protocols\r\n%b\r\n" % lines)
        cycle.response_started = cycle.response_complete = True
        return WebSocket(http)


class WebSocket(asyncio.Protocol):
    """A connection after its handshake. It has one reader. http: the connection before, as which it still counts."""

    def __init__(self, http: HttpProtocol) -> None:
        self._http = http
        self._buffer = bytearray()
        self._arrived = asyncio.Event()
        self._writable = asyncio.Event()
        self._writable.set()
        self.is_open = True
        self.on_finish: Callable[[], object] = lambda: None
        """Called when the server stops: the WebSocket is to be closed once what is under way is done."""
        http.websocket = self
        http.transport.set_protocol(self)
        http.flow.resume_reading()

    # Callbacks of the transport.

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        if len(self._buffer) > _MOST_WAITING_BYTES:
            self._http.flow.pause_reading()
        self._arrived.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end()
        self._http.connection_lost(exc)

    def pause_writing(self) -> None:
        self._writable.clear()
        self._http.pause_writing()

    def resume_writing(self) -> None:
        self._writable.set()
        self._http.resume_writing()

    def finish(self) -> None:
        self.on_finish()

    # What the application calls.

    async def receive(self) -> bytes | None:
        """Return the next message; None after the last one. Raises WebSocketError, upon which it is to be closed."""
        parts: list[bytes] = []
        num_bytes = num_frames = 0
        while self.is_open:
            frame = take_frame(self._buffer, MOST_MESSAGE_BYTES - num_bytes)
            if frame is None:
                await self._wait_for_bytes()
                continue
            num_frames += 1
            if frame.kind < _CLOSE:
                if (frame.kind == _CONTINUED) != bool(num_bytes or parts):
                    raise WebSocketError(NOT_UNDERSTOOD, "the parts of two messages are mixed")
                parts.append(frame.data)
                num_bytes += len(frame.data)
                if frame.is_last:
                    await asyncio.sleep(0)  # whatever else waits for the loop runs between two messages
                    return b"".join(parts)
            elif frame.kind == _CLOSE:
                self.close(int.from_bytes(frame.data[:2], "big") if len(frame.data) >= 2 else None)
            elif frame.kind == _PING:
                await self._write(_PONG, frame.data)
            if num_frames % _FRAMES_OF_TURN == 0:
                await asyncio.sleep(0)
        return None

    async def send(self, text: bytes) -> None:
        """Send a message; waits for a client that does not read. Does nothing once the WebSocket is closed."""
        await self._write(_TEXT, text)

    async def ping(self) -> None:
        """Send what the client answers by itself, so that no proxy takes the connection for an unused one."""
        await self._write(_PING, b"")

    def close(self, code: int | None, reason: str = "") -> None:
        """Close the WebSocket, and its connection once the client has read all of it. code: None says none."""
        if not self.is_open:
            return
        said = b"" if code is None else code.to_bytes(2, "big") + reason.encode()[: _MOST_CONTROL_BYTES - 2]
        http = self._http
        http.transport.write(frame_of(_CLOSE, said))
        self._end()
        http.websocket = None
        http.transport.set_protocol(http)
        http.linger()

    async def _write(self, kind: int, data: bytes) -> None:
        if self.is_open:
            self._http.transport.write(frame_of(kind, data))
            await self._writable.wait()

    async def _wait_for_bytes(self) -> None:
        self._http.flow.resume_reading()
        self._arrived.clear()
        await self._arrived.wait()

    def _end(self) -> None:
        self.is_open = False
        self._arrived.set()
        self._writable.set()


def upgrade_required() -> ApiError:
    """Return the error for a request that has to be the handshake of a WebSocket."""
    return ApiError(
        426,
        "this is a WebSocket; connect with a client for those, by a URL that begins with ws:// or wss://",
        code="upgrade_required",
        headers={"Upgrade": "websocket", "Connection": "Upgrade"},
    )


def _is_key(key: bytes) -> bool:
    try:
        return len(b64decode(key, validate=True)) == 16
    except binascii.Error:
        return False
