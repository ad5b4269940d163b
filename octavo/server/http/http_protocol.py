"""A connection of the HTTP server: uvicorn's protocol with limits, deadlines, JSON errors and half-closed clients."""

from __future__ import annotations

import asyncio
import logging
from enum import Enum, auto
from typing import Any, Final

import httptools
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from octavo.core.process.authentication import keep_alive
from octavo.server.errors import ApiError, raw_response, shutting_down
from octavo.server.http.connections import CLOSING_S, Connections, ForwardedRequests, Place
from octavo.server.http.sockets import CAN_SEE_RESETS, PeerWatch, has_unread_bytes
from octavo.server.http.websocket import Upgrade, WebSocket
from octavo.server.sending import ClosesGently, DirectBody, without_chunks

_MOST_URL_BYTES: Final = 16 << 10
_MOST_HEADERS: Final = 256
_MOST_PIPELINED: Final = 16
"""Requests that a client may send before it gets the response to the first of them."""
_MOST_SMALL_CHUNKS: Final = 4096
_SMALL_CHUNK_BYTES: Final = 64
"""A body may have this many chunks, and one more per this many bytes: every chunk takes time, however small."""
_SLICE_BYTES: Final = 64 << 10
"""Bytes parsed between two checks of limits: headers may exceed their limit by as much."""
_MOST_DISCARDED_BYTES: Final = 64 << 20
_DEAD_PEER_S: Final = 120
"""Seconds for which a machine may leave packets unanswered."""
_LINGER_S: Final = 10.0
"""Seconds for which received data is discarded so that the client can read its last response."""
_SHORT_LINGER_S: Final = 0.2
"""The same seconds while the server stops."""
_UNREAD_RESPONSE_S: Final = 120.0
"""Seconds for which a client may leave a response unread that fills all buffers."""
_HEALTH: Final = b"/health"

logger = logging.getLogger(__name__)


class _Phase(Enum):
    """What the connection receives: nothing yet, headers, a body, or data that is discarded after an error."""

    IDLE = auto()
    HEADERS = auto()
    BODY = auto()
    DISCARD = auto()


class HttpProtocol(HttpToolsProtocol):
    """One connection. It refuses requests over the limits of `Connections` with JSON errors, and is then closed.

    A client that shuts down its side of the connection after its request gets the response. Probe bytes without meaning
    show whether it has closed the other side too: its machine then answers with a reset.
    """

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        connections: Connections,
        loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config=config, server_state=server_state, app_state={}, _loop=loop)
        self.logger = logger
        self._open = connections
        self._args = connections.args
        self._phase = _Phase.IDLE
        self._timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None
        self._running: RequestResponseCycle | None = None
        self._num_header_bytes = 0
        self._num_silent_bytes = 0
        self._num_chunks = self._num_body_bytes = 0
        self._num_discarded_bytes = 0
        self.place: Place | None = None
        """The `Place` of the connection, if it had one before `connection_made`."""
        self._is_half_closed = self._is_lingering = self._is_resuming = False
        self.websocket: WebSocket | None = None

    @property
    def _is_responding(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._open.add(self)
        self._response_transport = ClosesGently(self.transport, self.close)
        self._peer = PeerWatch(transport, self.loop, self._probe, self._open.looks)
        self._is_encrypted = transport.get_extra_info("ssl_object") is not None
        keep_alive(transport.get_extra_info("socket"), _DEAD_PEER_S)
        self._place = self.place or Place(self._open, transport)
        self._over_limit = self._place.over_limit
        self._forwarded = ForwardedRequests(self._open, self._place.address)
        self._arm(self._args.header_timeout_s if self._over_limit is None else CLOSING_S)

    def connection_lost(self, exc: Exception | None) -> None:
        self._disarm()
        self._unset_keepalive_if_required()
        if self._write_timer is not None:
            self._write_timer.cancel()
        self._place.leave()
        self._forwarded.release_all()
        self._open.remove(self)
        super().connection_lost(exc)
        if self._running is not None and self._running is not self.cycle:  # a later request waits behind it
            self._running.disconnected = True
            self._running.message_event.set()

    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        view = memoryview(data)
        for start in range(0, len(data), _SLICE_BYTES):
            if self._phase is not _Phase.DISCARD and not self.transport.is_closing():
                self._parse(view[start : start + _SLICE_BYTES])
        if self._phase is _Phase.DISCARD or (self._phase is _Phase.BODY and not self._is_responding):
            self._discard(len(data))
        elif self._timer is not None:
            pass
        elif self._phase is _Phase.BODY:
            # the rest is read when the application receives the body, which it does after it has checked the key
            self.flow.pause_reading()
            self._arm(self._args.body_timeout_s)
        elif self._phase is _Phase.HEADERS:
            self._arm(self._args.header_timeout_s)
        elif not self._is_responding:
            self._arm(self.timeout_keep_alive)

    def _parse(self, data: memoryview) -> None:
        try:
            while (num_parsed := self._parse_until_upgrade(data)) is not None:
                data = data[num_parsed:]
                self._parse_until_upgrade(self._framing())
        except httptools.HttpParserError as error:
            refusal = error.__context__  # what a callback has raised
            if not isinstance(refusal, ApiError):
                refusal = ApiError(400, f"this is not HTTP/1.1: {error}", code="invalid_http")
            self._refuse(refusal)
            return
        # an unfinished header, or bytes between the chunks of a body, have not been in a callback
        self._num_silent_bytes += len(data)
        if self._num_silent_bytes > self._args.max_header_size + _SLICE_BYTES:
            self._refuse(self._too_large())

    def _parse_until_upgrade(self, data: memoryview | bytes) -> int | None:
        """Parse data up to a body behind a header `Upgrade`, which the parser takes for another protocol. Return how
        many bytes came before it, None when there is none."""
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            return int(upgrade.args[0])
        return None

    def _framing(self) -> bytes:
        """Return headers without `Upgrade` that make the parser read the body of the request whose `Upgrade` is
        ignored."""
        self._is_resuming = True
        framing = [each for each in self.headers if each[0] in (b"content-length", b"transfer-encoding")]
        return b"POST / HTTP/1.1\r\n%b\r\n" % b"".join(b"%b: %b\r\n" % each for each in framing)

    # Callbacks of the parser. What they raise ends the parsing.

    def on_message_begin(self) -> None:
        if self._is_resuming:
            return
        super().on_message_begin()
        self._disarm()
        self._phase = _Phase.HEADERS
        self._num_header_bytes = self._num_silent_bytes = 0
        self._num_chunks = self._num_body_bytes = 0

    def on_url(self, url: bytes) -> None:
        if self._is_resuming:
            return
        super().on_url(url)
        self._num_header_bytes += len(url)
        if len(self.url) > _MOST_URL_BYTES:
            raise ApiError(414, f"the URL has more than {_MOST_URL_BYTES:,} bytes", code="url_too_long")

    def on_header(self, name: bytes, value: bytes) -> None:
        self._num_silent_bytes = 0
        self._num_header_bytes += len(name) + len(value)
        if self._num_header_bytes > self._args.max_header_size:
            raise self._too_large()
        if self._phase is not _Phase.HEADERS:
            return  # a trailer, which is ignored: all checks of headers are done
        super().on_header(name, value)
        if len(self.headers) > _MOST_HEADERS:
            raise ApiError(431, f"there are more than {_MOST_HEADERS} headers", code="headers_too_large")

    def on_headers_complete(self) -> None:
        if self._is_resuming:
            self._is_resuming = False
            return
        self._disarm()
        if len(self.pipeline) >= _MOST_PIPELINED:
            message = f"more than {_MOST_PIPELINED} requests were sent ahead of their responses"
            raise ApiError(429, message, code="too_many_requests_ahead")
        refusal = self._over_limit or self._forwarded.count(self.headers)
        if refusal is not None and not self._asks_for_health():
            raise refusal
        super().on_headers_complete()
        self.cycle.transport = self._response_transport  # type: ignore[assignment]
        self.cycle.scope["extensions"] = {DirectBody.NAME: DirectBody(self.cycle)}  # type: ignore[dict-item]
        if self.parser.should_upgrade():
            self.cycle.scope["extensions"][Upgrade.NAME] = Upgrade(self, self.cycle)  # type: ignore[assignment]
        self._phase = _Phase.BODY
        if self._over_limit is not None or self._open.is_draining:
            self.cycle.keep_alive = False
        if self.pipeline:
            self._peer.watch()  # reading, by which its end is noticed, stops at the body of a request that waits

    def on_chunk_header(self) -> None:
        self._num_chunks += 1
        if self._num_chunks > _MOST_SMALL_CHUNKS + self._num_body_bytes // _SMALL_CHUNK_BYTES:
            message = f"the body comes in chunks of less than {_SMALL_CHUNK_BYTES} bytes; send larger ones"
            raise ApiError(400, message, code="chunks_too_small")

    def on_body(self, body: bytes) -> None:
        self._num_silent_bytes = 0
        self._num_body_bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():
            return  # its body follows, with the headers of `_framing`
        super().on_message_complete()
        self._disarm()
        self._phase = _Phase.IDLE
        if sum(len(cycle.body) for cycle, _ in self.pipeline) < _SLICE_BYTES:
            # the end of the connection is noticed by reading alone, so requests that wait do not stop it
            self.flow.resume_reading()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        if cycle.scope["http_version"] == "1.0":
            cycle.waiting_for_100_continue = False
            app = without_chunks(cycle, app)
        start = super()._start_asgi_task
        if cycle.scope["path"].endswith("/health"):
            start(cycle, app)  # also among thousands of others
            return

        def start_if_open() -> None:
            if not self.transport.is_closing():
                start(cycle, app)

        self._open.starts.add(self.loop, start_if_open)

    def on_response_complete(self) -> None:
        self._forwarded.release()
        if not self._is_lingering:
            super().on_response_complete()

    def _asks_for_health(self) -> bool:
        path = self.url.partition(b"?")[0]
        return path in (_HEALTH, self.root_path.encode() + _HEALTH)

    # Deadlines.

    def _arm(self, seconds: float) -> None:
        self._disarm()
        if self._open.is_draining:
            seconds = min(seconds, _SHORT_LINGER_S if self._phase is _Phase.DISCARD else CLOSING_S)
        self._timer = self.loop.call_later(seconds, self._miss_deadline)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _miss_deadline(self) -> None:
        self._timer = None
        if self._phase is _Phase.DISCARD:
            self.transport.abort()
        elif self._phase is _Phase.IDLE:
            self.transport.close()
        elif self._phase is _Phase.BODY and not self._is_responding:
            self.transport.abort()  # the response was sent before the end of the body
        elif self.flow.read_paused and not self._open.is_draining:
            self._arm(self._args.body_timeout_s)  # the server itself does not read
        elif self._open.is_draining:
            self._refuse(shutting_down())
        else:
            what = "headers" if self._phase is _Phase.HEADERS else "body"
            self._refuse(ApiError(408, f"the {what} of the request did not arrive in time", code="request_timeout"))

    def pause_writing(self) -> None:
        super().pause_writing()
        self._write_timer = self.loop.call_later(_UNREAD_RESPONSE_S, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

    # Refusals.

    def _too_large(self) -> ApiError:
        message = (
            f"URL and headers have more than {self._args.max_header_size:,} bytes; send less, or start the server "
            "with a larger --max-header-size"
        )
        return ApiError(431, message, code="headers_too_large")

    def _refuse(self, error: ApiError) -> None:
        """Send an error if a response is due, then read on for a moment, so that the client can read it."""
        in_body, self._phase = self._phase is _Phase.BODY, _Phase.DISCARD
        self._disarm()
        if in_body and self.pipeline:
            self.pipeline.popleft()  # the request that is refused is the last of those that wait
            self.cycle = self.pipeline[0][0] if self.pipeline else self._running  # type: ignore[assignment]
            in_body = False
        if self._is_responding and (not in_body or self.cycle.response_started):
            self.cycle.keep_alive = False  # the error would be in the middle of the response that is being sent
            return
        if self._is_responding:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self.transport.write(raw_response(error))
        self.linger()

    def close(self) -> None:
        """Close once written data is sent; read data that still comes, or the system would reset the connection."""
        if self._phase is _Phase.IDLE and not has_unread_bytes(self.transport.get_extra_info("socket")):
            self.transport.close()
        else:
            self.linger()

    def linger(self) -> None:
        """Send written data and the end of the stream; discard for a while data that the client still sends."""
        self._phase = _Phase.DISCARD
        self._is_lingering = True
        self._arm(_LINGER_S)
        if self._is_encrypted:
            self.transport.close()  # TLS itself reads on until the client has closed its side
        elif not self.transport.is_closing():
            self.transport.write_eof()
            self.flow.resume_reading()

    def _discard(self, num_bytes: int) -> None:
        """Count discarded bytes, and read the next ones when it is this connection's turn."""
        self._num_discarded_bytes += num_bytes
        if self._num_discarded_bytes > _MOST_DISCARDED_BYTES:
            self.transport.abort()
        if not self.transport.is_closing():
            self.flow.pause_reading()
            self.loop.call_later(self._open.next_discard_s(self.loop.time()), self._read_on)

    def _read_on(self) -> None:
        if not self.transport.is_closing():
            self.flow.resume_reading()

    # The client's end of the connection, and ours.

    def eof_received(self) -> bool:  # type: ignore[override]
        """Keep the connection while a response is due to a request that has arrived whole."""
        if not self._is_responding or self.cycle.more_body or not CAN_SEE_RESETS or self._is_encrypted:
            return False
        if not self._is_half_closed:
            self._is_half_closed = True
            self._disarm()
            self.cycle.keep_alive = False
            self._peer.watch()
        return True

    def _probe(self) -> bytes:
        """Return bytes without a meaning, to which the peer's machine answers with a reset if it has closed the
        connection."""
        running = self._running
        if running is None or running.response_complete or running.scope["http_version"] != "1.1":
            return b""
        if not running.response_started:
            return b"HTTP/1.1 100 Continue\r\n\r\n"
        # a response without a length is a stream of events, in which this is a comment
        return b"3\r\n:\n\n\r\n" if running.chunked_encoding else b""

    def finish(self) -> None:
        """Close the connection, after the response to a request that is open or arrives soon."""
        if self.websocket is not None:
            self.websocket.finish()
            return
        if self._is_responding:
            self.cycle.keep_alive = False
        if self._phase is _Phase.BODY:
            self._arm(CLOSING_S)
        elif self._phase is _Phase.HEADERS:
            self._refuse(shutting_down())
        elif self._is_lingering:
            self.transport.abort()
        elif self._is_encrypted and self.cycle is None:
            self._arm(CLOSING_S)  # the first request comes a moment behind the handshake
        elif not self._is_responding and not has_unread_bytes(self.transport.get_extra_info("socket")):
            self.transport.close()
