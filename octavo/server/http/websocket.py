"""WebSockets (RFC 6455) on connections of the HTTP server: handshake, buffers and close.

The request for one passes all checks of HTTP requests; its handler makes the connection a WebSocket. Frames are read
and written by `websocket_protocol`, which is imported at the first handshake.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, Final

from octavo.server.errors import ApiError

if TYPE_CHECKING:
    from uvicorn.protocols.http.httptools_impl import RequestResponseCycle
    from websockets.frames import Frame

    from octavo.server.http.http_protocol import HttpProtocol
    from octavo.server.http.websocket_protocol import RaisingProtocol

MOST_MESSAGE_BYTES: Final = 1 << 20
"""Longest message that a client may send, in one frame or several."""
GOING_AWAY, TOO_LARGE = 1001, 1009
"""Codes with which the server closes a WebSocket."""

_MOST_WAITING_BYTES: Final = 256 << 10
"""Most received bytes that wait for their reader, besides the rest of a message; reading from the socket then
pauses."""
_BYTES_OF_TURN: Final = 1024
"""Bytes that are parsed in one turn of the event loop: 170 of the smallest frames, which take 1 ms."""
_FIRST_CONTROL: Final = 8
"""Frames of this kind and above are no part of a message."""


class WebSocketError(Exception):
    """A client has sent an invalid or too long message. code: the close code of the WebSocket."""

    def __init__(self, code: int, message: str) -> None:
        if code == TOO_LARGE:
            message = f"a message has more than {MOST_MESSAGE_BYTES:,} bytes; send shorter ones"
        super().__init__(message)
        self.code = code


class Upgrade:
    """Makes a WebSocket of the connection of a request. It is an extension of the scope of requests with a header
    `Upgrade` that octavo's own HTTP protocol has read."""

    NAME: Final = "octavo.upgrade"

    def __init__(self, http: HttpProtocol, cycle: RequestResponseCycle) -> None:
        self._http, self._cycle = http, cycle

    @staticmethod
    async def load() -> None:
        """Import what `accept` needs, while the event loop goes on."""
        await asyncio.to_thread(import_module, "octavo.server.http.websocket_protocol")

    def accept(self, request_id: str, subprotocol: str) -> WebSocket:
        """Complete the handshake, with a subprotocol if the client offers it. Raises ApiError for a request that does
        not begin one."""
        from octavo.server.http.websocket_protocol import accept

        http, cycle = self._http, self._cycle
        scope = cycle.scope
        is_alone = cycle is http.cycle and not cycle.more_body
        if not is_alone or (scope["method"], scope["http_version"]) != ("GET", "1.1"):
            raise no_handshake("the request")
        protocol, response = accept(scope["path"], scope["headers"], subprotocol, request_id)
        http.transport.write(response)
        cycle.response_started = cycle.response_complete = True
        return WebSocket(http, protocol)


class WebSocket(asyncio.Protocol):
    """A connection after its handshake. It has one reader. http: the HTTP connection before, whose place in the counts
    it keeps."""

    def __init__(self, http: HttpProtocol, protocol: RaisingProtocol) -> None:
        self._http = http
        self._protocol = protocol
        self._buffer = bytearray()
        self._frames: deque[Frame] = deque()
        self._error: WebSocketError | None = None
        self._arrived = asyncio.Event()
        self._writable = asyncio.Event()
        self._writable.set()
        self.is_open = True
        self.on_finish: Callable[[], object] = lambda: None
        """Called when the server stops: it must close the WebSocket once open answers are sent."""
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
        """Return the next message; None after the last one. Raises WebSocketError, after which the caller must close
        it."""
        message = bytearray()
        while (frame := await self._next_frame()) is not None:
            if frame.opcode < _FIRST_CONTROL:
                message += frame.data
                if frame.fin:
                    return bytes(message)
        return None

    async def send(self, text: bytes) -> None:
        """Send a message; waits for a client that does not read. Does nothing once the WebSocket is closed."""
        if self.is_open:
            self._protocol.send_text(text)
            self._flush()
            await self._writable.wait()

    async def ping(self) -> None:
        """Send a ping, which clients answer by themselves, so that no proxy closes the connection as unused."""
        if self.is_open:
            self._protocol.send_ping(b"")
            self._flush()
            await self._writable.wait()

    def close(self, code: int, reason: str) -> None:
        """Close the WebSocket, and its connection once the client has read all of it. reason: at most 123 bytes."""
        if self.is_open:
            self._protocol.end(code, reason)
            self._flush()

    async def _next_frame(self) -> Frame | None:
        while not self._frames:
            if self._error is not None:
                raise self._error
            if not self.is_open:
                return None
            await self._read_frames()
        await asyncio.sleep(0)  # the event loop serves others between two frames
        return self._frames.popleft()

    async def _read_frames(self) -> None:
        """Parse frames from bytes. Pings and a close frame are answered in order, after earlier messages."""
        if not self._buffer:
            self._http.flow.resume_reading()
            self._arrived.clear()
            await self._arrived.wait()
            return
        data = self._buffer[:_BYTES_OF_TURN]
        del self._buffer[:_BYTES_OF_TURN]
        try:
            self._protocol.receive_data(data)
        except WebSocketError as error:
            self._error = error
        self._frames.extend(self._protocol.events_received())  # type: ignore[arg-type]  # the handshake is over
        self._flush()
        await self._writable.wait()

    def _flush(self) -> None:
        """Write the protocol's pending bytes; after a close frame, end the connection."""
        http = self._http
        if data := b"".join(self._protocol.data_to_send()):
            http.transport.write(data)
        if self.is_open and self._protocol.close_expected():
            self._end()
            http.websocket = None
            http.transport.set_protocol(http)
            http.linger()

    def _end(self) -> None:
        self.is_open = False
        self._arrived.set()
        self._writable.set()


def upgrade_required() -> ApiError:
    """Return the error for a plain request to an endpoint that needs the handshake of a WebSocket."""
    return ApiError(
        426,
        "this is a WebSocket; connect with a client for those, by a URL that begins with ws:// or wss://",
        code="upgrade_required",
        headers={"Upgrade": "websocket", "Connection": "Upgrade"},
    )


def not_by_this_server() -> ApiError:
    """Return the error for a handshake that another HTTP server than octavo's own has read."""
    return ApiError(
        426,
        "this HTTP server opens no WebSockets of octavo; connect to octavo's own server, which octavo serve starts, or "
        "send the whole sound to /v1/audio/transcriptions",
        code="upgrade_required",
        headers={"Upgrade": "websocket", "Connection": "Upgrade"},
    )


def no_handshake(what: str) -> ApiError:
    """Return the error for a wrong WebSocket handshake. what: the part that is wrong, for the message."""
    return ApiError(
        400,
        "the handshake of a WebSocket is a GET of HTTP/1.1 without a body, with nothing behind it, and has a "
        f"Sec-WebSocket-Key of 16 bytes in base64; wrong here is {what}",
        code="invalid_http",
    )
