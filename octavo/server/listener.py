"""The socket that a server listens on: from before its model is loaded until the last connection is taken from it."""

from __future__ import annotations

import asyncio
import ctypes
import errno
import os
import socket
import struct
import sys
from typing import Final

from octavo.errors import ConfigError

_HANDSHAKE_S: Final = 0.1
"""How long handshakes that have begun, and first requests of new connections, may take until the listener closes."""

_SO_ATTACH_FILTER: Final = 26
_REFUSE_NEW: Final = (
    # code, jump if true, jump if false, operand: a classic BPF program over the TCP header of each incoming packet
    (0x30, 0, 0, 13),  # load the flags
    (0x54, 0, 0, 0x12),  # keep SYN and ACK
    (0x15, 0, 1, 0x02),  # SYN alone begins a connection:
    (0x06, 0, 0, 0),  # drop
    (0x06, 0, 0, 0xFFFFFFFF),  # pass
)


def bind(host: str, port: int) -> socket.socket:
    """A socket that holds the address, so that nobody else gets it while the model loads. Raises ConfigError."""
    try:
        found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise ConfigError(
            f"host {host!r} is not an address of this machine ({error}); give one, such as 127.0.0.1"
        ) from error
    # a name such as localhost may have an address of each family; clients try the older one in any case
    family, kind, protocol, _, address = min(found, key=lambda entry: entry[0] != socket.AF_INET)
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        # without this, others could still bind the port until we listen, which we do when the model is loaded
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
    except OSError as error:
        listener.close()
        raise ConfigError(f"cannot listen on {host}:{port}: {_bind_problem(error)}") from error
    listener.setblocking(False)
    return listener


def _bind_problem(error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return "another program uses this port; choose another with --port, or --port 0 for a free one"
    if error.errno == errno.EACCES:
        return "ports below 1024 need more rights; choose another with --port"
    if error.errno == errno.EADDRNOTAVAIL:
        return "this machine does not have that address; choose another with --host"
    return os.strerror(error.errno or 0)


def url_of(listener: socket.socket) -> str:
    """Return the address as a URL."""
    host, port = listener.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


async def stop_listening(server: asyncio.Server, listener: socket.socket) -> None:
    """Close a listening socket without a reset for any client whose connection stood.

    The system takes connections that the event loop has not accepted yet, and would reset them. So beginnings of
    connections are dropped first; the others are accepted, and what they ask is read. A client whose beginning was
    dropped repeats it, and is refused.
    """
    _drop_beginnings(listener)
    await asyncio.sleep(_HANDSHAKE_S)
    server.close()
    listener.close()


def _drop_beginnings(listener: socket.socket) -> None:
    if sys.platform != "linux":
        return  # there, a connection of the last moment may be reset
    program = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in _REFUSE_NEW))
    filter_ = struct.pack("HP", len(_REFUSE_NEW), ctypes.addressof(program))
    listener.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, filter_)
