"""Connections of a server that speaks TLS, until their handshakes are done."""

from __future__ import annotations

import asyncio
import ssl
from typing import TYPE_CHECKING, Any

from octavo.server.http.connections import CLOSING_S, Connections, Place
from octavo.server.http.http_protocol import HttpProtocol

if TYPE_CHECKING:
    SSLProtocol: Any
else:
    from uvloop.loop import SSLProtocol  # what a server of uvloop makes itself, before anything is known of a client


class Encrypted(SSLProtocol):  # type: ignore[misc]
    """The TLS layer of a connection, which counts under its address from its beginning, before the handshake is done.
    http: the protocol inside.
    """

    def __init__(self, http: HttpProtocol, connections: Connections, tls: ssl.SSLContext) -> None:
        self._http, self._connections = http, connections
        super().__init__(
            asyncio.get_running_loop(),
            http,
            tls,
            None,
            server_side=True,
            ssl_handshake_timeout=connections.args.header_timeout_s,
            ssl_shutdown_timeout=CLOSING_S,
        )

    def connection_made(self, transport: asyncio.Transport) -> None:
        """Count the connection, and begin the handshake."""
        self.transport = transport
        self._http.place = self._place = Place(self._connections, transport)
        self._connections.add(self)
        super().connection_made(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop counting the connection."""
        super().connection_lost(exc)
        self._place.leave()
        self._connections.remove(self)

    def finish(self) -> None:
        """Close the connection soon unless its handshake is done: then the HTTP protocol closes it."""
        if self._http.transport is None:
            asyncio.get_running_loop().call_later(CLOSING_S, self._abort_unfinished)

    def _abort_unfinished(self) -> None:
        if self._http.transport is None:
            self.transport.abort()
