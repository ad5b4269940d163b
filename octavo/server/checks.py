"""Checks of a request before a handler reads its body: the host, the origin of a web page, the declared type of the
body, and its size.

A web page can send any request that a form could send, `Content-Type` text or none, to any server that its browser
reaches, and reads the response if it made the browser take the server for its own host (DNS rebinding).
"""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from typing import Final

from starlette.types import Message, Receive

from octavo.server.errors import ApiError
from octavo.server.http.sockets import is_loopback
from octavo.server.multipart import is_form
from octavo.server.shared_bytes import SharedBytes

Fields = Mapping[bytes, bytes]
"""The headers of a request by their names in lower case; the values of a repeated header are joined by commas."""

_HOST: Final = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^\s:/?#@\[\]\\]*)(:[0-9]*)?")
_READING_METHODS: Final = frozenset({"GET", "HEAD", "OPTIONS"})
_UNCOUNTED_BYTES: Final = 64 << 10


def fields_of(headers: Collection[tuple[bytes, bytes]]) -> dict[bytes, bytes]:
    """Return the `Fields` of a request's headers."""
    fields: dict[bytes, bytes] = {}
    for name, value in headers:
        fields[name] = fields[name] + b", " + value if name in fields else value
    return fields


def own_hosts(listening_on: str) -> frozenset[str] | None:
    """Return the host names, besides addresses, that a server on this address accepts; None (all) when other machines
    can reach it."""
    return frozenset({"localhost", socket.gethostname().lower()}) if is_loopback(listening_on) else None


class HeaderChecks:
    """Refuses requests without one valid `Host` (400) or for the host of another server (403), forms and commands
    without a body from pages of other origins (403), and bodies that are compressed or not JSON (415).

    hosts: names that requests may have in `Host`; addresses and names below `localhost` always may. None allows all.
    open_paths: paths that are served under every host name, as their responses contain nothing of requests.
    origins: web origins whose pages may send commands, or `*`. form_paths: paths that take forms with files, which a
    page of any origin can send.
    """

    def __init__(
        self,
        hosts: Collection[str] | None,
        open_paths: Collection[str] = (),
        origins: Collection[str] = (),
        form_paths: Collection[str] = (),
    ) -> None:
        self._form_paths = form_paths
        self._hosts = None if hosts is None or "*" in hosts else {host.lower() for host in hosts}
        self._open_paths = open_paths
        self._origins = origins
        self._host_refusal = lru_cache(256)(self._refusal_of_host)

    def check_host(self, http_version: str, path: str, fields: Fields) -> None:
        """Raise ApiError for the `Host` of a request."""
        host = fields.get(b"host")
        if host is not None or http_version != "1.0":
            refusal = self._host_refusal(host)
            if refusal is not None and (refusal[0] == 400 or path not in self._open_paths):
                raise ApiError(refusal[0], refusal[1], code=refusal[2])

    def check(self, method: str, path: str, fields: Fields) -> None:
        """Raise ApiError for headers other than `Host`. The path and the method must be those of an endpoint."""
        if (encoding := fields.get(b"content-encoding", b"").decode("latin-1").lower()) not in ("", "identity"):
            message = f"Content-Encoding {encoding} is not supported; send the body uncompressed"
            raise ApiError(415, message, code="unsupported_content_encoding", headers={"Accept-Encoding": "identity"})
        if method in _READING_METHODS and fields.get(b"upgrade", b"").lower() != b"websocket":
            return  # a browser lets the pages of every origin open WebSockets, and read them
        if b"content-type" in fields and not (path in self._form_paths and is_form(fields[b"content-type"])):
            check_json(fields[b"content-type"])
            return
        origin, host = (fields.get(name, b"").decode("latin-1") for name in (b"origin", b"host"))
        is_own = origin.partition("://")[2].lower() == host.lower()
        if b"origin" in fields and not (is_own or origin in self._origins or "*" in self._origins):
            message = (
                f"pages of {origin} may not send this; send it with Content-Type: application/json, or start the "
                "server with --allowed-origins and that origin"
            )
            raise ApiError(403, message, code="origin_not_allowed")

    def _refusal_of_host(self, header: bytes | None) -> tuple[int, str, str] | None:
        """Return status, message and code of the error for a `Host`. Only texts are cached: exceptions keep frames."""
        host = (header or b"").decode("latin-1")
        if header is None or _HOST.fullmatch(host) is None:
            message = f"Host is {host or 'absent'}; send one Host, a name or address, with a port or without"
            return 400, message, "invalid_http"
        if not host or self._hosts is None:
            return None
        name = (host if host.endswith("]") else host.rpartition(":")[0] or host).strip("[]").lower()
        if name in self._hosts or name.endswith(".localhost"):
            return None
        try:
            ipaddress.ip_address(name)
        except ValueError:
            message = (
                f"this server is not {host}; address it by its IP address or as localhost, or start it with "
                "--allow-hosts and that name"
            )
            return 403, message, "host_not_allowed"
        return None


def check_json(content_type: bytes) -> None:
    """Raise ApiError 415 for a body that is not declared as JSON. A browser asks the server before it lets a page of
    another origin send JSON."""
    if content_type == b"application/json":
        return
    media_type = content_type.decode("latin-1").partition(";")[0].strip().lower()
    if media_type != "application/json" and not media_type.endswith("+json"):
        message = f"Content-Type is {media_type or 'absent'}; send JSON with Content-Type: application/json"
        raise ApiError(415, message, code="invalid_content_type")


class BodyLimits:
    """Refuses bodies of more than `max_bytes` with 413, whether their length is announced or not, and with 503 bodies
    that do not fit into `max_total_bytes` beside those of other open requests.

    max_total_bytes: limit of all bodies together; the first 64 KiB of each are not counted. One sender may use half of
    it, but always one body.
    """

    def __init__(self, max_bytes: int, max_total_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._max_total_bytes = max_total_bytes
        self._shared = SharedBytes(max_total_bytes, max(max_bytes, max_total_bytes // 2))

    @contextmanager
    def limited(self, receive: Receive, fields: Fields, sender: str) -> Iterator[Receive]:
        """Yield `receive` such that it raises ApiError for a body that is too large. Its bytes count until the end.

        Raises ApiError for a body that is announced as too large.
        """
        announced = fields.get(b"content-length", b"0")
        if b"transfer-encoding" not in fields and announced.isdigit():
            if int(announced) > self._max_bytes:
                raise self._too_large()
            if int(announced) <= _UNCOUNTED_BYTES:
                yield receive
                return
        num_bytes = num_counted = 0

        async def limited_receive() -> Message:
            nonlocal num_bytes, num_counted
            message = await receive()
            if message["type"] == "http.request":
                num_bytes += len(message.get("body", b""))
                if num_bytes > self._max_bytes:
                    raise self._too_large()
                more = max(0, num_bytes - _UNCOUNTED_BYTES) - num_counted
                self._count(sender, more)
                num_counted += more
            return message

        try:
            yield limited_receive
        finally:
            self._shared.release(sender, num_counted)

    def _count(self, sender: str, num_bytes: int) -> None:
        """Count bytes that are held. Raises ApiError 503 when they exceed the limit of all bodies or of the sender."""
        if not self._shared.take(sender, num_bytes):
            raise ApiError(
                503,
                f"the bodies of open requests fill the {self._max_total_bytes:,} bytes that they may take, half of "
                "them for one client; come back later, or start the server with a larger --max-bodies-size",
                code="too_many_bodies",
                headers={"Retry-After": "1"},
            )

    def _too_large(self) -> ApiError:
        return ApiError(
            413,
            f"the body has more than {self._max_bytes:,} bytes; send less, or start the server with a larger "
            "--max-body-size",
            code="request_body_too_large",
            headers={"Connection": "close"},
        )
