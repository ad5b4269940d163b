"""What a request's headers are refused for before its body is read: hosts and origins of web pages, and how the body is
declared. Plain ASGI.

A web page can send any request that a form could send, `Content-Type` text or none, to any server that its browser
reaches, and reads the answer where it made the browser take the server for its own host (DNS rebinding).
"""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Collection

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from octavo.server.errors import ApiError
from octavo.server.keys import local_path

_HOST = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^\s:/?#@\[\]\\]*)(:[0-9]*)?")
_READING_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})


def is_json(content_type: str) -> bool:
    """Is this the media type of JSON? A browser asks the server before it lets a foreign page send it."""
    media_type = content_type.partition(";")[0].strip().lower()
    return media_type == "application/json" or media_type.endswith("+json")


def not_json(content_type: str) -> ApiError:
    """The refusal of a body that is not declared as JSON."""
    given = content_type.partition(";")[0].strip().lower() or "absent"
    return ApiError(
        415,
        f"Content-Type is {given}; send JSON with Content-Type: application/json",
        code="invalid_content_type",
    )


def own_hosts(listening_on: str) -> frozenset[str] | None:
    """Names that a server on this address has, besides addresses; None, all names, when other machines reach it."""
    try:
        is_loopback = listening_on == "localhost" or ipaddress.ip_address(listening_on).is_loopback
    except ValueError:
        is_loopback = False
    return frozenset({"localhost", socket.gethostname().lower()}) if is_loopback else None


class GuardHeaders:
    """Refuses requests without one valid `Host` (400) or for a host that is not ours (403), bodyless commands of
    foreign pages (403), and bodies that are compressed or not JSON (415).

    hosts: names that requests may have in `Host`; addresses and names below `localhost` always may. None allows all.
    open_paths: paths that may be asked for by any name, as they show nothing of requests.
    origins: web origins whose pages may send commands, or `*`.
    """

    def __init__(
        self, app: ASGIApp, hosts: Collection[str] | None, open_paths: Collection[str], origins: Collection[str]
    ) -> None:
        self._app = app
        self._hosts = None if hosts is None or "*" in hosts else {host.lower() for host in hosts}
        self._open_paths = open_paths
        self._origins = origins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        error = self._error(scope, Headers(scope=scope)) if scope["type"] == "http" else None
        await (self._app if error is None else error.response())(scope, receive, send)

    def _error(self, scope: Scope, headers: Headers) -> ApiError | None:
        hosts = headers.getlist("host")
        host = hosts[0] if hosts else ""
        if len(hosts) > 1 or (not hosts and scope["http_version"] != "1.0") or _HOST.fullmatch(host) is None:
            message = (
                f"Host is {', '.join(hosts) or 'absent'}; send one Host, a name or address, with a port or without"
            )
            return ApiError(400, message, code="invalid_http")
        if host and not self._is_ours(host) and local_path(scope) not in self._open_paths:
            message = (
                f"this server is not {host}; ask for it by its address or as localhost, or start it with "
                "--allow-hosts and that name"
            )
            return ApiError(403, message, code="host_not_allowed")
        encoding = ", ".join(headers.getlist("content-encoding")).lower()
        if encoding not in ("", "identity"):
            message = f"Content-Encoding {encoding} is not supported; send the body uncompressed"
            return ApiError(415, message, code="unsupported_content_encoding", headers={"Accept-Encoding": "identity"})
        content_type = headers.get("content-type", "")
        if scope["method"] in _READING_METHODS or is_json(content_type):
            return None
        if content_type:
            return not_json(content_type)
        origin = headers.get("origin")
        if origin is not None and not self._is_allowed(origin, host):
            message = (
                f"pages of {origin} may not send this; send it with Content-Type: application/json, or start the "
                "server with --allow-origins and that origin"
            )
            return ApiError(403, message, code="origin_not_allowed")
        return None

    def _is_ours(self, host: str) -> bool:
        if self._hosts is None:
            return True
        name = _host_name(host)
        if name in self._hosts or name.endswith(".localhost"):
            return True
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return True

    def _is_allowed(self, origin: str, host: str) -> bool:
        return origin in self._origins or "*" in self._origins or origin.partition("://")[2].lower() == host.lower()


def _host_name(host: str) -> str:
    """The name of `name:port`, in lower case, without the brackets of an address."""
    name = host if host.endswith("]") else host.rpartition(":")[0] or host
    return name.strip("[]").lower()
