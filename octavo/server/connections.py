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
from octavo.server.turns import FewPerTurn

if TYPE_CHECKING:
    from octavo.server.encryption import Encrypted
    from octavo.server.http_protocol import HttpProtocol

MOST_UNCOUNTED: Final = 64
"""Connections beyond the limits that are open at once; the oldest is closed for the next."""
_IPV6_NETWORK_BITS: Final = 64
"""A client of IPv6 has a whole network of this many leading bits, so it counts as one address."""

_MOST_HOPS: Final = 32
"""Last entries of X-Forwarded-For that are read: a header full of them would take half a second of the event loop."""

_MOST_STARTS: Final = 8
"""Requests that are started in one turn of the event loop: about 5 ms."""

_MOST_LOOKS: Final = 32
"""Connections whose other end has sent its last that are looked at in one turn of the event loop: about 3 ms."""

_DISCARD_INTERVAL_S: Final = 0.005
"""Between two reads, of up to 256 KiB each, of what is discarded: 50 MB/s."""

CLOSING_S: Final = 2.0
"""Time for a client to finish a request that it has begun, or to read an error, before its connection is closed."""


class Connections:
    """Counts connections by address, and has all that are open. Used on the event loop only.

    args: the limits of one connection, and of those of one address. max_connections: of all addresses.
    is_draining: whether the server stops; each connection ends with the response that is due. starts: of all requests.
    looks: the first ones, whether the other end of a connection that sends nothing more is there.
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
        """Return the error when one more connection of this address is too many; else count it until `release`."""
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
        """Count one less for an address that `refusal` has counted."""
        host = counted_address(address)
        self._num_counted -= 1
        self._num_per_address[host] -= 1
        if not self._num_per_address[host]:
            del self._num_per_address[host]

    def is_proxy(self, address: str) -> bool:
        """Return whether this is the address of a trusted proxy; what connects to a Unix socket, with none, is one."""
        if not address:
            return True
        parsed = _parse(address) if self._proxies else None
        return parsed is not None and any(parsed in network for network in self._proxies)

    def forwarded_address(self, headers: Iterable[tuple[bytes, bytes]], peer: str) -> str:
        """Return the client of a trusted proxy `peer`: the last address in X-Forwarded-For that is no trusted proxy."""
        values = [value.decode("latin-1") for name, value in headers if name == b"x-forwarded-for"]
        hops = [hop.strip() for hop in ",".join(values).rsplit(",", _MOST_HOPS)[-_MOST_HOPS:]]
        return next((hop for hop in reversed(hops) if _parse(hop) is not None and not self.is_proxy(hop)), peer)

    def next_discard_s(self, now: float) -> float:
        """Return the seconds until a connection may read again what is discarded.

        One connection at a time does, so that many of them take no more of the event loop than one.
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
    """What a connection counts as, from its beginning to `leave`.

    over_limit: the error where its address, or the server, has too many; it is read, and refused.
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
        """Count the connection no more; may be called again."""
        if self._is_counted:
            self._is_counted = False
            self._connections.release(self.address)
        self._connections.remove_uncounted(self)


class ForwardedRequests:
    """The open requests of one connection, which count under their clients' addresses where it is a trusted proxy's."""

    def __init__(self, connections: Connections, address: str) -> None:
        self._connections = connections
        self._address = address
        self._clients: deque[str | None] = deque()

    def count(self, headers: Iterable[tuple[bytes, bytes]]) -> ApiError | None:
        """Count a request of a trusted proxy; return the error when it is one too many."""
        if not self._connections.is_proxy(self._address):
            return None
        client = self._connections.forwarded_address(headers, self._address)
        refusal = self._connections.refusal(client)
        self._clients.append(client if refusal is None else None)
        return refusal

    def release(self) -> None:
        """Count one less, after the response to the first of those that are open: responses come in their order."""
        if self._clients and (client := self._clients.popleft()) is not None:
            self._connections.release(client)

    def release_all(self) -> None:
        while self._clients:
            self.release()


def _too_many(status: int, message: str) -> ApiError:
    return ApiError(status, message, code="too_many_connections", headers={"Retry-After": "1"})


def counted_address(address: str) -> str:
    """Return what an address is counted as: itself, or the network of a client of IPv6."""
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
