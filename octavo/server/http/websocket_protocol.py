"""RFC 6455 by the package websockets; imported with the first WebSocket, as that takes tens of milliseconds."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from websockets.datastructures import Headers
from websockets.exceptions import InvalidHeader, InvalidUpgrade
from websockets.http11 import Request
from websockets.protocol import State
from websockets.server import ServerProtocol

from octavo.server.errors import ApiError
from octavo.server.http.websocket import MOST_MESSAGE_BYTES, WebSocketError, no_handshake, upgrade_required

_VERSION: Final = "Sec-WebSocket-Version"


class RaisingProtocol(ServerProtocol):
    """Raises a WebSocketError for a client's mistake, so that it can be reported before the WebSocket closes."""

    def fail(self, code: int, reason: str = "") -> None:
        raise WebSocketError(int(code), reason)

    def end(self, code: int, reason: str) -> None:
        """Close the WebSocket, also after an error. reason: at most 123 bytes."""
        super().fail(code, reason)


def accept(
    path: str, fields: Iterable[tuple[bytes, bytes]], subprotocol: str, request_id: str
) -> tuple[RaisingProtocol, bytes]:
    """Return the protocol of a WebSocket, and the response to its handshake, for the caller to send.

    fields: the headers of the request. subprotocol: chosen if the client offers it. Raises ApiError.
    """
    protocol = RaisingProtocol(
        select_subprotocol=lambda _, offered: next((each for each in offered if each == subprotocol), None),
        state=State.OPEN,  # else it would parse the request itself
        max_size=MOST_MESSAGE_BYTES,
    )
    headers = Headers([(name.decode("latin-1"), value.decode("latin-1")) for name, value in fields])
    response = protocol.accept(Request(path, headers))
    match protocol.handshake_exc:
        case None:
            response.headers["X-Request-Id"] = request_id
            return protocol, response.serialize()
        case InvalidUpgrade():
            raise upgrade_required()
        case InvalidHeader(name=name) if name == _VERSION:
            message = f"{_VERSION} has to be 13"  # RFC 6455 has another status for it than the package
            raise ApiError(426, message, code="upgrade_required", headers={_VERSION: "13"})
        case InvalidHeader(name=name):
            raise no_handshake(name)
        case error:
            raise error
