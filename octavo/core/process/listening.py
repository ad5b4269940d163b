"""Listeners for processes that have yet to prove that they know a secret."""

from __future__ import annotations

import errno
import os
import socket
import stat
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Final

from octavo.core.process.authentication import GREETING_S
from octavo.errors import ConfigError

MOST_GREETINGS: Final = 64
"""Connections of a listener that prove themselves at the same time."""

_PAUSE_S: Final = 0.1
_MOST_PATH_BYTES: Final = 107
"""Of a Unix socket, on Linux."""


@contextmanager
def in_time(connection: socket.socket) -> Iterator[None]:
    """Enclose a greeting, which ends after `GREETING_S` however slowly its bytes come. Raises OSError where there can
    be no more threads."""
    expiry = threading.Timer(GREETING_S, cut, [connection])
    expiry.daemon = True
    try:
        expiry.start()
    except RuntimeError as error:
        raise ConnectionError(str(error)) from error
    try:
        yield
    finally:
        expiry.cancel()


class Greetings:
    """Accepts the connections of a listener. Of more than `MOST_GREETINGS` that have proved nothing yet the oldest is
    ended: one that knows the secret proves it at once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: list[socket.socket] = []

    def begin(self, listener: socket.socket, serve: Callable[[socket.socket], None], name: str) -> None:
        """Serve each connection in a thread of this name until the listener is shut down; accept them in another one.

        serve: ends its greeting, which it encloses in `limited`, and closes the connection.
        """
        accepted = (listener, serve, name)
        threading.Thread(target=self._accept, args=accepted, name=f"{name}-listener", daemon=True).start()

    def _accept(self, listener: socket.socket, serve: Callable[[socket.socket], None], name: str) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError as error:
                if error.errno in (errno.EBADF, errno.EINVAL):
                    return
                time.sleep(_PAUSE_S)  # no descriptors are left, or the connection has gone
                continue
            try:
                threading.Thread(target=serve, args=[connection], name=name, daemon=True).start()
            except RuntimeError:  # there can be no more threads
                connection.close()
                time.sleep(_PAUSE_S)

    @contextmanager
    def limited(self, connection: socket.socket) -> Iterator[None]:
        """Enclose the greeting of a connection."""
        with self._lock:
            if len(self._open) == MOST_GREETINGS:
                cut(self._open.pop(0))
            self._open.append(connection)
        try:
            with in_time(connection):
                yield
        finally:
            with self._lock, suppress(ValueError):  # it was ended for another one
                self._open.remove(connection)


def cut(connection: socket.socket) -> None:
    """End what waits for the connection, in all threads and at both ends."""
    with suppress(OSError):  # the other end has gone, or the socket is closed
        connection.shutdown(socket.SHUT_RDWR)


def open_connection(place: str | tuple[str, int], timeout_s: float) -> socket.socket:
    """Return a connection to the path of a Unix socket, or to host and port. Raises OSError."""
    if not isinstance(place, str):
        return socket.create_connection(place, timeout_s)
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.settimeout(timeout_s)
        connection.connect(place)
    except BaseException:
        connection.close()
        raise
    return connection


def listen_privately(path: str) -> socket.socket:
    """Return a listening Unix socket for this user alone, in place of one without a listener. Raises OSError."""
    if (size := len(os.fsencode(path))) > _MOST_PATH_BYTES:
        raise OSError(
            f"its path has {size} bytes, and that of a Unix socket at most {_MOST_PATH_BYTES}; choose a shorter "
            "folder, which for the cores of one server is in that of the variable TMPDIR"
        )
    remove_stale(path)
    listener = socket.socket(socket.AF_UNIX)
    try:
        os.fchmod(listener.fileno(), 0o600)  # before `bind` makes the file
        listener.bind(path)
        listener.listen()
    except BaseException:
        listener.close()
        raise
    return listener


def remove_stale(path: str) -> None:
    """Remove the socket of a process that has died. Raises OSError when a process listens on it."""
    with suppress(FileNotFoundError):
        if not stat.S_ISSOCK(os.stat(path).st_mode):
            return  # `bind` will refuse it
        with socket.socket(socket.AF_UNIX) as probe:
            try:
                probe.connect(path)
            except ConnectionRefusedError:
                os.unlink(path)
            else:
                raise OSError("another process listens on it")


def own_address(toward: str) -> str:
    """Return the address from which this machine reaches another one, to which nothing is sent. Raises ConfigError."""
    try:
        family, kind, _, _, place = socket.getaddrinfo(toward, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(place)
            address: str = probe.getsockname()[0]
            return address
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"master_addr {toward} cannot be reached: {error}") from error
