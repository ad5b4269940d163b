"""Reads the URLs of images, videos and sounds: what they hold themselves, files of one folder, and hosts that the
operator allows."""

from __future__ import annotations

import base64
import binascii
import http.client
import ipaddress
import os
import socket
import ssl
import stat
import threading
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Final
from urllib.parse import SplitResult, unquote, urljoin, urlsplit

from octavo.config.media_args import MediaArgs, media_limits
from octavo.errors import InvalidRequest
from octavo.multimodal.images import MOST_BYTES

FETCH_S: Final = 5.0
"""Seconds that one URL may take, redirects included."""

MOST_REDIRECTS: Final = 3

_CHUNK: Final = 64 << 10
_HEADERS: Final = {"Accept": "image/*, */*;q=0.8", "Accept-Encoding": "identity"}


class MustReadElsewhere(Exception):
    """Reading takes time that the caller's thread, for which others wait, must not spend.

    fetches: a URL has to be fetched; else only reading takes time.
    """

    def __init__(self, *, fetches: bool) -> None:
        super().__init__()
        self.fetches = fetches


class MediaUrls:
    """What the operator lets requests read. Without arguments, only URLs that hold their data themselves."""

    def __init__(self, args: MediaArgs) -> None:
        self._hosts = frozenset(host.lower().rstrip(".") for host in args.allowed_media_domains)
        self._folder = Path(args.allowed_local_media_path).resolve() if args.allowed_local_media_path else None
        self.limits = media_limits(args)
        self.reads_images = self.waits_for_hosts = True
        """False where a URL, or one that has to be fetched, raises MustReadElsewhere."""

    def read(self, url: str, field: str) -> bytes:
        """Return the bytes of a URL, at most `MOST_BYTES`. Raises InvalidRequest, which begins with `field`."""
        if not self.reads_images:
            raise MustReadElsewhere(fetches=False)
        scheme = url.partition(":")[0].lower()
        if scheme == "data":
            return _data(url, field)
        if scheme == "file" and self._folder is not None:
            return _file(url, self._folder, field)
        if scheme in ("http", "https") and self._hosts:
            self._check_host(url, field)
            if not self.waits_for_hosts:
                raise MustReadElsewhere(fetches=True)
            return self._fetch(url, field)
        needed = {"file": "--allowed-local-media-path", "http": "--allowed-media-domains"}.get(scheme.rstrip("s"))
        remedy = f"; the operator may allow it with {needed}" if needed else ""
        raise InvalidRequest(
            f"{field} begins with {scheme[:20]!r}, which is not read here: send the data itself, as in "
            f"data:image/png;base64,…{remedy}",
            field=field,
            code="unsupported_image_url",
        )

    def _check_host(self, url: str, field: str) -> SplitResult:
        try:
            parts = urlsplit(url)
            host, port = (parts.hostname or "").rstrip("."), parts.port  # a port that is none raises ValueError
        except ValueError as error:
            raise _refused(field, f"is no URL ({error})") from error
        if parts.scheme not in ("http", "https") or parts.username is not None or port == 0:
            raise _refused(field, "leads to something that is no plain http: or https: URL")
        if host not in self._hosts:
            raise _refused(field, f"names the host {host[:100]!r}, which is none of --allowed-media-domains")
        return parts

    def _fetch(self, url: str, field: str) -> bytes:
        """Fetch in a thread, since looking up a name ends at no deadline of ours."""
        opened: list[socket.socket] = []
        found: list[bytes | InvalidRequest] = []
        late = f"was not fetched within {FETCH_S:g} s"

        def follow() -> None:
            try:
                found.append(self._follow(url, field, opened))
            except InvalidRequest as error:
                found.append(error)
            except TimeoutError:
                found.append(_refused(field, late))
            except (OSError, http.client.HTTPException, ValueError) as error:
                reason = f"cannot be fetched ({type(error).__name__}: {str(error)[:200]})"
                found.append(_refused(field, reason))

        thread = threading.Thread(target=follow, name="octavo-fetch", daemon=True)
        thread.start()
        thread.join(FETCH_S)
        if not found:
            for connection in opened:
                with suppress(OSError):  # it is closed
                    connection.shutdown(socket.SHUT_RDWR)
            raise _refused(field, late)
        if isinstance(found[0], InvalidRequest):
            raise found[0]
        return found[0]

    def _follow(self, url: str, field: str, opened: list[socket.socket]) -> bytes:
        for _ in range(MOST_REDIRECTS + 1):
            parts = self._check_host(url, field)
            connection = _connection(parts, field)
            opened.append(connection.sock)
            target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
            with closing(connection):
                connection.request("GET", target, headers=_HEADERS)
                with connection.getresponse() as response:
                    if response.status == 200:
                        return _bounded(response.read, field)
                    if response.status not in (301, 302, 303, 307, 308):
                        raise _refused(field, f"cannot be fetched: its host returned {response.status}")
                    url = _joined(url, response.getheader("Location") or "", field)
        raise _refused(field, f"is redirected more than {MOST_REDIRECTS} times")


def _joined(url: str, target: str, field: str) -> str:
    try:
        return urljoin(url, target)
    except ValueError as error:
        raise _refused(field, f"is no URL ({error})") from error


def _connection(parts: SplitResult, field: str) -> http.client.HTTPConnection:
    """Connect to an address that was checked, so that no second look-up finds another one."""
    host, is_https = parts.hostname or "", parts.scheme == "https"
    port = parts.port or (443 if is_https else 80)
    is_address = _is_address(host)
    addresses = [str(info[4][0]) for info in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]
    private = [each for each in addresses if not is_address and not _is_public(each)]
    if private:
        raise _refused(field, f"names a host with a private address; allow the address itself, if {host!r} is meant")
    connection = http.client.HTTPConnection(host, port, timeout=FETCH_S)
    connection.sock = _connected(addresses, port)
    if is_https:
        connection.sock = ssl.create_default_context().wrap_socket(connection.sock, server_hostname=host)
    return connection


def _connected(addresses: Sequence[str], port: int) -> socket.socket:
    for address in addresses[:-1]:
        with suppress(OSError):  # another one may be reached
            return socket.create_connection((address, port), FETCH_S)
    return socket.create_connection((addresses[-1], port), FETCH_S)


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _is_public(address: str) -> bool:
    """Return whether an address belongs to no private, local or reserved network, also behind IPv6's translations."""
    found = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(found, ipaddress.IPv6Address):
        found = found.ipv4_mapped or found.sixtofour or found
        if found in ipaddress.ip_network("64:ff9b::/96"):  # NAT64, RFC 6052
            found = ipaddress.IPv4Address(int(found) & 0xFFFFFFFF)
    return found.is_global and not found.is_multicast


def _file(url: str, folder: Path, field: str) -> bytes:
    parts = urlsplit(url)
    try:
        path = Path(unquote(parts.path)).resolve()
    except (OSError, ValueError) as error:
        raise _refused(field, f"is no path of a file ({error})") from error
    if parts.netloc not in ("", "localhost") or not path.is_relative_to(folder):
        raise _refused(field, "is outside of the folder of --allowed-local-media-path")
    try:
        # not following links, since one may have come since the path was resolved; not waiting for a pipe's writer
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise _refused(field, "is no regular file")
            return _bounded(file.read, field)
    except OSError as error:
        raise _refused(field, f"cannot be read ({error.strerror})") from error


def _bounded(read: Callable[[int], bytes], field: str) -> bytes:
    pieces, size = [], 0
    while piece := read(_CHUNK):
        pieces.append(piece)
        size += len(piece)
        if size > MOST_BYTES:
            raise _refused(field, f"has more than {MOST_BYTES:,} bytes, the limit of a file; send a smaller one")
    return b"".join(pieces)


def _data(url: str, field: str) -> bytes:
    head, comma, body = url.partition(",")
    if not comma or not head.endswith(";base64"):
        raise _refused(field, "is a data: URL without ;base64; encode the data so")
    if len(body) > MOST_BYTES * 4 // 3 + 4:
        raise _refused(
            field,
            f"has {len(body):,} characters, more than a file of {MOST_BYTES:,} bytes has; send a smaller one",
        )
    try:
        return base64.b64decode(body, validate=True)
    except (binascii.Error, ValueError) as error:
        raise _refused(field, f"is no base64 ({error})") from error


def _refused(field: str, reason: str) -> InvalidRequest:
    return InvalidRequest(f"{field} {reason}", field=field)
