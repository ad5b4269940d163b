"""The open connections of a server: their limits, how many an address has, and their end."""

from __future__ import annotations

import asyncio
import ipaddress
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Protocol

from octavo.server.errors import ApiError

_MOST_UNCOUNTED: Final = 64
"""Connections beyond the limits that are open at once; the oldest is closed for the next."""
_IPV6_NETWORK_BITS: Final = 64
"""A client of IPv6 has a whole network of this many leading bits, so it counts as one address."""

_DISCARD_INTERVAL_S: Final = 0.005
"""Between two reads, of up to 256 KiB each, of what is thrown away: 50 MB/s."""

LAST_WORDS_S: Final = 2.0
"""Time for a client to finish what it began to send, or to read an error, when its connection has to end."""

Network = ipaddress.IPv4Network | ipaddress.IPv6Network


@dataclass(frozen=True)
class ConnectionLimits:
    """What a connection may take before its request is known.

    max_header_bytes: of URL and headers together. header_timeout_s: from a connection's start, or a request's first
    byte, to the end of the headers. body_timeout_s: from there to the end of the body.
    max_per_address: open connections of one address. max_connections: of all addresses.
    trusted_proxies: networks whose connections are not counted; each of their requests is, under the address that
    X-Forwarded-For gives, while it is open.
    """

    max_header_bytes: int = 64 << 10
    header_timeout_s: float = 10.0
    body_timeout_s: float = 60.0
    max_per_address: int = 1024
    max_connections: int = 1 << 16
    trusted_proxies: tuple[Network, ...] = ()


class Connection(Protocol):
    """What `Connections` needs of a connection. Both methods are for a server that stops."""

    def finish(self) -> None:
        """Answer what was asked, and then close."""

    def abort(self) -> None:
        """Close at once."""


class Connections:
    """Counts connections by address, and knows all that are open. Used on the event loop only.

    is_draining: the server stops: each connection ends with the answer that is due.
    """

    def __init__(self, limits: ConnectionLimits) -> None:
        self.limits = limits
        self.is_draining = False
        self._open: set[Connection] = set()
        self._uncounted: deque[Connection] = deque()
        self._num_per_address: Counter[str] = Counter()
        self._num_counted = 0
        self._closed = asyncio.Event()
        self._next_discard = 0.0

    def add(self, connection: Connection) -> None:
        """Note a new connection."""
        self._open.add(connection)

    def remove(self, connection: Connection) -> None:
        """Note that a connection has closed."""
        self._open.discard(connection)
        if connection in self._uncounted:
            self._uncounted.remove(connection)
        if not self._open:
            self._closed.set()

    def add_uncounted(self, connection: Connection) -> None:
        """Keep a connection beyond the limits, in the place of the oldest such one when there are many."""
        if len(self._uncounted) == _MOST_UNCOUNTED:
            self._uncounted.popleft().abort()
        self._uncounted.append(connection)

    def refusal(self, address: str) -> ApiError | None:
        """The error when one more connection of this address is too many; else it is counted, until `release`."""
        host = counted_address(address)
        if self._num_per_address[host] >= self.limits.max_per_address:
            message = (
                f"{address} has {self.limits.max_per_address:,} open connections or requests, which is the limit; use "
                "them again, or start the server with a larger --max-connections-per-address"
            )
            return ApiError(429, message, code="too_many_connections", headers={"Retry-After": "1"})
        if self._num_counted >= self.limits.max_connections:
            return ApiError(
                503,
                f"the server has {self.limits.max_connections:,} open connections, which is the limit; try again",
                code="too_many_connections",
                headers={"Retry-After": "1"},
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
        """Is this the address of a trusted proxy?"""
        if not self.limits.trusted_proxies:
            return False
        parsed = _parse(address)
        return parsed is not None and any(parsed in network for network in self.limits.trusted_proxies)

    def forwarded_address(self, headers: Iterable[tuple[bytes, bytes]], peer: str) -> str:
        """Whom a trusted proxy `peer` asks for: the last address in X-Forwarded-For that is no trusted proxy itself."""
        hops = [
            hop for name, value in headers if name == b"x-forwarded-for" for hop in value.decode("latin-1").split(",")
        ]
        addresses = [hop.strip() for hop in hops]
        return next(
            (each for each in reversed(addresses) if _parse(each) is not None and not self.is_proxy(each)), peer
        )

    def next_discard_s(self, now: float) -> float:
        """Seconds until a connection may read again what is thrown away.

        One connection at a time does, so that many of them take no more of the event loop than one.
        """
        self._next_discard = max(now, self._next_discard) + _DISCARD_INTERVAL_S
        return self._next_discard - now

    def drain(self) -> None:
        """From now on each connection ends with the answer that is due."""
        self.is_draining = True

    def finish_all(self) -> None:
        """Close all connections without a request, and the others with the end of theirs."""
        for connection in list(self._open):
            connection.finish()

    def abort_all(self) -> None:
        """Close all connections at once."""
        for connection in list(self._open):
            connection.abort()

    async def wait_closed(self) -> None:
        """Wait until no connection is open."""
        while self._open:
            self._closed.clear()
            await self._closed.wait()


def counted_address(address: str) -> str:
    """What an address is counted as: itself, or the network of a client of IPv6."""
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
