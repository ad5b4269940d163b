"""System calls on sockets that the event loop does not offer: for the listening socket, from before the model is loaded
until the last connection is accepted, and for connections, also those of uvloop."""

from __future__ import annotations

import asyncio
import ctypes
import errno
import fcntl
import ipaddress
import os
import select
import socket
import ssl
import struct
import sys
import termios
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final

from octavo.config.server_args import ServerArgs
from octavo.core.process.listening import remove_stale
from octavo.errors import ConfigError
from octavo.server.http.turns import FewPerTurn

CAN_SEE_RESETS: Final = sys.platform == "linux"
"""Whether `is_reset` works on this system."""

_TCP_CLOSE: Final = 7
"""The state of a connection that its peer has reset, in the first byte of Linux's TCP_INFO."""
_FIRST_LOOK_S, _LONGEST_LOOK_S = 0.05, 1.0
"""Seconds until the next check whether a peer is there: the first one, and the longest; doubled each time."""
_HANDSHAKE_S: Final = 0.1
"""Seconds for unfinished TCP handshakes, and for first requests of new connections, before the listener closes."""
_ACCEPTING_S: Final = 5.0
"""Most seconds for accepting these connections on a busy machine, or without a free file descriptor."""

_SO_ATTACH_FILTER: Final = 26
_BIND_PROBLEMS: Final = {
    errno.EADDRINUSE: "another program uses this port; choose another with --port, or --port 0 for a free one",
    errno.EACCES: "ports below 1024 need more rights; choose another with --port",
    errno.EADDRNOTAVAIL: "this machine does not have that address; choose another with --host",
}
_REFUSE_NEW: Final = (
    # code, jump if true, jump if false, operand: a classic BPF program over the TCP header of each incoming packet
    (0x30, 0, 0, 13),  # load the flags
    (0x54, 0, 0, 0x12),  # keep SYN and ACK
    (0x15, 0, 1, 0x02),  # SYN alone begins a connection:
    (0x06, 0, 0, 0),  # drop
    (0x06, 0, 0, 0xFFFFFFFF),  # pass
)


@contextmanager
def listening(args: ServerArgs) -> Iterator[socket.socket]:
    """Yield a socket that holds the server's address, which API servers may share; a path is removed at the end.

    Raises ConfigError.
    """
    with bind(args.host, args.port) if args.uds is None else bind_path(args.uds) as listener:
        try:
            if args.uds is None and args.api_server_count > 1:
                # set only now: with it, the address could be bound beside the API servers of another `octavo serve`
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            yield listener
        finally:
            if args.uds is not None:
                Path(args.uds).unlink(missing_ok=True)


def is_loopback(host: str) -> bool:
    """Return whether only this machine reaches a host."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def bind(host: str, port: int, *, is_shared: bool = False) -> socket.socket:
    """Return a socket that holds an address, which no other program gets while the model loads. Raises ConfigError.

    is_shared: other sockets of this user that were bound with it (SO_REUSEPORT) may have the same address; each one
    that listens gets a part of the connections.
    """
    try:
        found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise ConfigError(
            f"host {host!r} is not an address of this machine ({error}); give one, such as 127.0.0.1"
        ) from error
    # a name such as localhost may have an address of each family; clients try the older one in any case
    family, kind, protocol, _, address = min(found, key=lambda entry: entry[0] != socket.AF_INET)
    listener = socket.socket(family, kind, protocol)
    if is_shared:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        # without this, others could still bind the port until we listen, which we do when the model is loaded
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
    except OSError as error:
        listener.close()
        problem = _BIND_PROBLEMS.get(error.errno or 0) or os.strerror(error.errno or 0)
        raise ConfigError(f"cannot listen on {host}:{port}: {problem}") from error
    listener.setblocking(False)
    return listener


def bind_path(path: str) -> socket.socket:
    """Return a Unix socket that holds a path; an existing socket file on which no program listens is replaced. Raises
    ConfigError."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        remove_stale(path)
        listener.bind(path)
    except (OSError, ValueError) as error:
        listener.close()
        problem = os.strerror(error.errno) if isinstance(error, OSError) and error.errno else error
        raise ConfigError(f"cannot listen on uds {path}: {problem}; choose another path") from error
    listener.setblocking(False)
    return listener


def url_of(listener: socket.socket, scheme: str = "http") -> str:
    """Return the address as a URL, or the path of a Unix socket after `unix:`."""
    if listener.family == socket.AF_UNIX:
        return f"unix:{listener.getsockname()}"
    host, port = listener.getsockname()[:2]
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"


def tls_context(args: ServerArgs) -> ssl.SSLContext | None:
    """Return the TLS settings of the server; None where it speaks plain HTTP. Raises ConfigError."""
    if args.ssl_certfile is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    load_certificate(context, args)
    context.verify_mode = ssl.VerifyMode(args.ssl_cert_reqs)
    try:
        if args.ssl_ca_certs is not None:
            context.load_verify_locations(args.ssl_ca_certs)
        if args.ssl_ciphers is not None:
            context.set_ciphers(args.ssl_ciphers)
    except OSError as error:
        raise ConfigError(f"ssl_ca_certs {args.ssl_ca_certs} or ssl_ciphers cannot be used: {error}") from error
    return context


def load_certificate(context: ssl.SSLContext, args: ServerArgs) -> None:
    """Read the certificate for new connections. Raises ConfigError."""
    assert args.ssl_certfile is not None
    try:
        # a key with a password would be asked for at the terminal
        context.load_cert_chain(args.ssl_certfile, args.ssl_keyfile, password="")
    except (OSError, ValueError) as error:
        files, remedy = f"ssl_certfile {args.ssl_certfile}", "give PEM files of one pair, the key without a password"
        if args.ssl_keyfile is not None:
            files += f" with ssl_keyfile {args.ssl_keyfile}"
        elif isinstance(error, ssl.SSLError):
            remedy = "give ssl_keyfile, too, the PEM file with the private key of the certificate, without a password"
        raise ConfigError(f"{files} cannot be used: {error}; {remedy}") from error


async def stop_listening(server: asyncio.Server, listener: socket.socket) -> None:
    """Close a listening socket without a reset for any client that is connected.

    Closing would reset the connections that the system has queued and the event loop has not accepted. So new SYN
    packets are dropped first; the queued connections are accepted, and their requests are read. A client whose SYN was
    dropped repeats it, and is refused.
    """
    _drop_beginnings(listener)
    await asyncio.sleep(_HANDSHAKE_S)
    late = select.poll()
    late.register(listener, select.POLLIN)
    until = time.monotonic() + _ACCEPTING_S
    while late.poll(0) and time.monotonic() < until:  # the event loop was busy, and has not accepted all of them yet
        await asyncio.sleep(0.001)
    server.close()
    listener.close()


def _drop_beginnings(listener: socket.socket) -> None:
    if sys.platform != "linux" or listener.family == socket.AF_UNIX:
        return  # on this system a connection of the last moment may be reset
    program = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in _REFUSE_NEW))
    filter_ = struct.pack("HP", len(_REFUSE_NEW), ctypes.addressof(program))
    listener.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, filter_)


def is_reset(connection: Any) -> bool:
    """Return whether the other end has reset the connection because it is closed there."""
    if connection.family == socket.AF_UNIX:
        poll = select.poll()
        poll.register(connection.fileno(), 0)
        return any(events & select.POLLHUP for _, events in poll.poll(0))
    state: bytes = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)
    return state[0] == _TCP_CLOSE


def has_finished(connection: Any) -> bool:
    """Return whether the other end has closed the connection or its side of it, even if unread bytes come before the
    end."""
    poll = select.poll()
    poll.register(connection.fileno(), select.POLLRDHUP)
    return bool(poll.poll(0))


class PeerWatch:
    """Aborts a connection that its other end has closed, even while it is not read.

    probe: returns bytes without a meaning, which are sent once the other end sends nothing more: its machine answers
    with a reset if it has closed the connection, and not only its side. first_looks: spreads the first checks of all
    connections.
    """

    def __init__(
        self,
        transport: asyncio.Transport,
        loop: asyncio.AbstractEventLoop,
        probe: Callable[[], bytes],
        first_looks: FewPerTurn,
    ) -> None:
        self._transport, self._loop, self._probe, self._first_looks = transport, loop, probe, first_looks
        self._is_watching = self._has_probed = False

    def watch(self) -> None:
        """Begin to check periodically whether the other end still has the connection."""
        if not self._is_watching and CAN_SEE_RESETS:
            self._is_watching = True
            self._first_looks.add(self._loop, partial(self._look, _FIRST_LOOK_S))

    def _look(self, delay_s: float) -> None:
        if self._transport.is_closing():
            return
        connection = self._transport.get_extra_info("socket")
        if is_reset(connection):
            self._transport.abort()
            return
        if not self._has_probed and has_finished(connection):
            self._has_probed = True
            self._transport.write(self._probe())
        self._loop.call_later(delay_s, self._look, min(2 * delay_s, _LONGEST_LOOK_S))


def has_unread_bytes(connection: Any) -> bool:
    """Return whether bytes have arrived that the event loop has not read yet. connection: None for one that has ended,
    as TLS has it until its protocol is told."""
    if connection is None or connection.fileno() < 0:
        return False
    waiting: bytes = fcntl.ioctl(connection.fileno(), termios.FIONREAD, bytes(4))
    return any(waiting)
