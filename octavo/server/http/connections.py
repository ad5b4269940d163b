"""The open connections of a server: their limits, their number by address, and their end."""

from __future__ import annotations

import asyncio
import ipaddress
from collections import Counter, deque
from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

from uvicorn.protocols.utils import get_remote_addr

from octavo.config.server_args import ServerArgs
from octavo.server.errors import ApiError
from octavo.server.http.turns import FewPerTurn

if TYPE_CHECKING:
    from octavo.server.http.encryption import Encrypted
    from octavo.server.http.http_protocol import HttpProtocol

MOST_UNCOUNTED: Final = 64
"""Connections beyond the limits that are open at once; the oldest is closed for the next."""
_IPV6_NETWORK_BITS: Final = 64
"""A client of IPv6 has a whole network with a prefix of this many bits, so the network counts as one address."""

_MOST_HOPS: Final = 32
"""Last entries of X-Forwarded-For that are read: a header full of them would take half a second of the event loop."""

_MOST_STARTS: Final = 8
"""Requests that are started in one turn of the event loop: about 5 ms."""

_MOST_LOOKS: Final = 32
"""Half-closed connections that are checked in one turn of the event loop: about 3 ms."""

_DISCARD_INTERVAL_S: Final = 0.005
"""Seconds between two reads, of up to 256 KiB each, of data that is discarded: 50 MB/s."""

CLOSING_S: Final = 2.0
"""Time for a client to finish a request that it has begun, or to read an error, before its connection is closed."""


class Connections:
    """Counts connections by address, and holds all open ones. Used on the event loop only.

    args: limits of one connection and of one address. max_connections: limit of all addresses together. is_draining:
    the server stops, and each connection ends with its current response. starts: spreads the starts of requests over
    turns of the event loop. looks: spreads the first checks whether the client of a half-closed connection is still
    there.
    """

    def __init__(self, args: ServerArgs, max_connections: int = 1 << 16) -> None:
        self.args = args
        self.max_connections = max_connections
        self.is_draining = False
        self.starts = FewPerTurn(_MOST_STARTS)
        self.looks = FewPerTurn(_MOST_LOOKS)
        self._proxies = [ipaddress.ip_network(proxy) for proxy in args.trusted_proxies]
        self._open: set[HttpProtocol | Encrypted] = set()
        self._uncounted: deque[Place] = deque()
        self._num_per_address: Counter[str] = Counter()
        self._num_counted = 0
        self._closed = asyncio.Event()
        self._next_discard = 0.0

    @property
    def num_free(self) -> int:
        """How many more connections may be open, 0 or less for none."""
        return self.max_connections - len(self._open)

    def add(self, connection: HttpProtocol | Encrypted) -> None:
        self._open.add(connection)

    def remove(self, connection: HttpProtocol | Encrypted) -> None:
        self._open.discard(connection)
        if not self._open:
            self._closed.set()

    def add_uncounted(self, place: Place) -> None:
        """Keep a connection beyond the limits; when there are many, the oldest of them is closed."""
        if len(self._uncounted) == MOST_UNCOUNTED:
            self._uncounted.popleft().transport.abort()
        self._uncounted.append(place)

    def remove_uncounted(self, place: Place) -> None:
        if place in self._uncounted:
            self._uncounted.remove(place)

    def refusal(self, address: str) -> ApiError | None:
        """Return an error if one more connection of this address exceeds a limit; else count it until `release`."""
        host = counted_address(address)
        if self._num_per_address[host] >= self.args.max_connections_per_address:
            return _too_many(
                429,
                f"{address} has {self.args.max_connections_per_address:,} open connections or requests, which is the "
                "limit; use them again, or start the server with a larger --max-connections-per-address",
            )
        if self._num_counted >= self.max_connections:
            return _too_many(
                503, f"the server has {self.max_connections:,} open connections, which is the limit; try again"
            )
        self._num_per_address[host] += 1
        self._num_counted += 1
        return None

    def release(self, address: str) -> None:
        """Stop counting a connection of an address that `refusal` has counted."""
        host = counted_address(address)
        self._num_counted -= 1
        self._num_per_address[host] -= 1
        if not self._num_per_address[host]:
            del self._num_per_address[host]

    def is_proxy(self, address: str) -> bool:
        """Return whether this is the address of a trusted proxy. A peer on a Unix socket has no address, and is one."""
        if not address:
            return True
        parsed = _parse(address) if self._proxies else None
        return parsed is not None and any(parsed in network for network in self._proxies)

    def forwarded_address(self, headers: Iterable[tuple[bytes, bytes]], peer: str) -> str:
        """Return the client behind the trusted proxy `peer`: the last address in X-Forwarded-For that is no trusted
        proxy."""
        values = [value.decode("latin-1") for name, value in headers if name == b"x-forwarded-for"]
        hops = [hop.strip() for hop in ",".join(values).rsplit(",", _MOST_HOPS)[-_MOST_HOPS:]]
        return next((hop for hop in reversed(hops) if _parse(hop) is not None and not self.is_proxy(hop)), peer)

    def next_discard_s(self, now: float) -> float:
        """Return the seconds until a connection may read data to discard again.

        Connections take turns, so that many of them take no more time of the event loop than one.
        """
        self._next_discard = max(now, self._next_discard) + _DISCARD_INTERVAL_S
        return self._next_discard - now

    def finish_all(self) -> None:
        """Close all connections without a request now, and the others after the response to theirs."""
        for connection in list(self._open):
            connection.finish()

    def abort_all(self) -> None:
        for connection in list(self._open):
            connection.transport.abort()

    async def wait_closed(self) -> None:
        while self._open:
            self._closed.clear()
            await self._closed.wait()


class Place:
    """The count of one connection under its address, from its beginning to `leave`.

    over_limit: the error if its address or the server has too many connections; its request is then read and refused.
    """

    def __init__(self, connections: Connections, transport: asyncio.Transport) -> None:
        self.transport = transport
        peer = get_remote_addr(transport)
        self.address = peer[0] if peer else ""
        self._connections = connections
        is_counted = not connections.is_proxy(self.address)
        self.over_limit = connections.refusal(self.address) if is_counted else None
        self._is_counted = is_counted and self.over_limit is None
        if self.over_limit is not None:
            connections.add_uncounted(self)

    def leave(self) -> None:
        """Stop counting the connection. Idempotent."""
        if self._is_counted:
            self._is_counted = False
            self._connections.release(self.address)
        self._connections.remove_uncounted(self)


class ForwardedRequests:
    """The open requests of one connection; those of a trusted proxy count under their clients' addresses."""

    def __init__(self, connections: Connections, address: str) -> None:
        self._connections = connections
        self._address = address
        self._clients: deque[str | None] = deque()

    def count(self, headers: Iterable[tuple[bytes, bytes]]) -> ApiError | None:
        """Count a request of a trusted proxy; return an error if it exceeds a limit of its client's address."""
        if not self._connections.is_proxy(self._address):
            return None
        client = self._connections.forwarded_address(headers, self._address)
        refusal = self._connections.refusal(client)
        self._clients.append(client if refusal is None else None)
        return refusal

    def release(self) -> None:
        """Stop counting the oldest open request after its response: responses come in the order of requests."""
        if self._clients and (client := self._clients.popleft()) is not None:
            self._connections.release(client)

    def release_all(self) -> None:
        while self._clients:
            self.release()


def _too_many(status: int, message: str) -> ApiError:
    return ApiError(status, message, code="too_many_connections", headers={"Retry-After": "1"})


def counted_address(address: str) -> str:
    """Return the key that an address counts under: the address itself, or the network of an IPv6 address."""
    parsed = _parse(address)
    if isinstance(parsed, ipaddress.IPv6Address):
        return str(ipaddress.ip_network((parsed, _IPV6_NETWORK_BITS), strict=False))
    return address if parsed is None else str(parsed)


def _parse(address: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        parsed = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return None
    mapped = parsed.ipv4_mapped if isinstance(parsed, ipaddress.IPv6Address) else None
    return mapped or parsed
