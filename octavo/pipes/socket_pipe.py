"""Pipes over TCP and Unix sockets: addresses, proof of the secret, and a carrier that sends what it is given."""

from __future__ import annotations

import logging
import os
import select
import socket
import stat
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Final, NamedTuple
from urllib.parse import urlsplit

from octavo.core.authentication import GREETING_S, authenticate, keep_alive
from octavo.errors import ConfigError, PipeClosed, PipeError
from octavo.pipes.pipe import CarriedPipe, Carrier, Pipe

_MOST_GREETINGS: Final = 64
"""Connections that are proving themselves at a time; more are closed at once."""

_log = logging.getLogger(__name__)


class Address(NamedTuple):
    """A parsed address: `place` is the path of a Unix socket, or host and port."""

    scheme: str
    family: socket.AddressFamily
    place: str | tuple[str, int]

    @classmethod
    def parse(cls, text: str) -> Address:
        """Raises ConfigError."""
        try:
            parts = urlsplit(text)
            if parts.scheme == "tcp" and parts.hostname and parts.port is not None:
                family = socket.AF_INET6 if ":" in parts.hostname else socket.AF_INET
                return cls("tcp", family, (parts.hostname, parts.port))
        except ValueError as error:
            raise ConfigError(f"{text!r} is no address of a pipe: {error}") from error
        if parts.scheme in _CARRIERS and parts.scheme != "tcp" and not parts.netloc and parts.path.startswith("/"):
            return cls(parts.scheme, socket.AF_UNIX, parts.path)
        raise ConfigError(f"{text!r} is no address of a pipe; expected tcp://host:port, unix:///path or shm:///path")

    def __str__(self) -> str:
        if isinstance(self.place, str):
            return f"{self.scheme}://{self.place}"
        host, port = self.place
        return f"{self.scheme}://[{host}]:{port}" if ":" in host else f"{self.scheme}://{host}:{port}"


class SocketCarrier:
    """A `Carrier` that sends heads and bodies through a connected stream socket."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self._connection = connection

    def send(self, head: bytes, body: memoryview, deadline: float) -> None:
        parts = [memoryview(head), body]
        while parts:
            try:
                sent = self._connection.sendmsg(parts, (), socket.MSG_NOSIGNAL)
            except BlockingIOError:
                wait_for(self._connection, select.POLLOUT, deadline, "read")
                continue
            except OSError as error:
                raise PipeClosed("the other end of the pipe has closed it") from error
            while parts and sent >= len(parts[0]):
                sent -= len(parts.pop(0))
            if sent:
                parts[0] = parts[0][sent:]

    def receive_head(self, into: memoryview, deadline: float | None) -> None:
        num_bytes = 0
        while num_bytes < len(into):
            try:
                count = self._connection.recv_into(into[num_bytes:])
            except BlockingIOError:
                wait_for(self._connection, select.POLLIN, deadline, "sent")
                continue
            except OSError:  # reset by the other machine
                count = 0
            if count == 0 and num_bytes == 0:
                raise PipeClosed("the other end of the pipe has closed it")
            if count == 0:
                raise PipeError(f"the pipe was cut after {num_bytes} of {len(into)} bytes")
            num_bytes += count

    def receive_body(self, into: memoryview, deadline: float) -> None:
        try:
            self.receive_head(into, deadline)
        except PipeClosed as error:
            raise PipeError(f"the pipe was cut before the {len(into)} bytes of a tensor") from error

    def interrupt(self) -> None:
        cut(self._connection)

    def close(self) -> None:
        self._connection.close()


def cut(connection: socket.socket) -> None:
    """End what waits for the connection, in all threads and at both ends."""
    with suppress(OSError):  # the other end has gone, or the socket is closed
        connection.shutdown(socket.SHUT_RDWR)


def wait_for(connection: socket.socket, event: int, deadline: float | None, what: str) -> None:
    """Wait until a socket can be read or written. Raises PipeError when the deadline is over; `what` the other end has
    not done is in its message."""
    poll = select.poll()
    poll.register(connection, event)
    remaining = None if deadline is None else (deadline - time.monotonic()) * 1000
    if (remaining is not None and remaining <= 0) or not poll.poll(remaining):
        raise PipeError(f"the other end of the pipe has {what} nothing within the deadline")


class SocketListener:
    """A `Listener`. Connections prove the secret in threads of their own, so that none can hold up the others."""

    def __init__(self, address: str, secret: bytes | None, make_pipe: Callable[[Carrier], CarriedPipe]) -> None:
        self._parsed = Address.parse(address)
        _check_secret(self._parsed, secret)
        self._secret, self._make_pipe = secret, make_pipe
        self._listener = _bound(self._parsed)
        if not isinstance(self._parsed.place, str):
            self._parsed = self._parsed._replace(place=self._listener.getsockname()[:2])
        self.address = str(self._parsed)
        self._greetings = threading.BoundedSemaphore(_MOST_GREETINGS)
        self._pipes: SimpleQueue[CarriedPipe | None] = SimpleQueue()
        self._is_closed = False
        threading.Thread(target=self._run, name="octavo-pipes", daemon=True).start()

    def accept(self, wait_s: float | None = None) -> Pipe:
        try:
            pipe = self._pipes.get(timeout=wait_s)
        except Empty:
            raise PipeError(f"no process has connected to {self.address} within {wait_s:g} s") from None
        if pipe is None:
            self._pipes.put(None)  # for other threads, and later calls
            raise PipeClosed(f"{self.address} is closed")
        return pipe

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        cut(self._listener)  # wakes the thread that accepts
        self._listener.close()
        if isinstance(self._parsed.place, str):
            with suppress(FileNotFoundError):
                os.unlink(self._parsed.place)
        with suppress(Empty):
            while pipe := self._pipes.get_nowait():
                pipe.close()
        self._pipes.put(None)

    def _run(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                if self._is_closed:
                    return
                time.sleep(0.1)  # no descriptors are left, or the connection has gone
                continue
            if not self._greetings.acquire(blocking=False):
                connection.close()
                continue
            threading.Thread(target=self._greet, args=(connection,), name="octavo-greeting", daemon=True).start()

    def _greet(self, connection: socket.socket) -> None:
        try:
            pipe = self._make_pipe(_greeted(connection, self._parsed, self._secret, is_listener=True))
            if self._is_closed:
                pipe.close()
            self._pipes.put(pipe)
        except (OSError, PipeError) as error:
            _log.warning("a connection to %s was refused: %s", self.address, error)
        finally:
            self._greetings.release()


def connect(address: str, secret: bytes | None, deadline_s: float) -> Carrier:
    """Return a carrier to a listener. Raises PipeError, or ConfigError for an address that is none."""
    parsed = Address.parse(address)
    _check_secret(parsed, secret)
    connection = socket.socket(parsed.family)
    try:
        connection.settimeout(deadline_s)
        connection.connect(parsed.place)
        return _greeted(connection, parsed, secret, is_listener=False)
    except OSError as error:
        connection.close()
        raise PipeError(f"{address} cannot be reached: {error}") from error


def _greeted(connection: socket.socket, address: Address, secret: bytes | None, *, is_listener: bool) -> Carrier:
    """Return the carrier of a connection whose other end has proved the secret; else close it, and raise PipeError or
    OSError."""
    expiry = threading.Timer(GREETING_S, cut, (connection,))
    expiry.daemon = True
    try:
        connection.settimeout(GREETING_S)
        expiry.start()  # however slowly the bytes come
        if secret is not None and not authenticate(connection, secret, is_listener=is_listener):
            raise PipeError(f"the other end of {address} does not know the secret")
        keep_alive(connection)
        return _CARRIERS[address.scheme](connection)
    except BaseException:
        connection.close()
        raise
    finally:
        expiry.cancel()


def _check_secret(address: Address, secret: bytes | None) -> None:
    if not secret and address.family != socket.AF_UNIX:
        raise ConfigError(f"{address} needs a secret, since any process can connect to it; set cluster_secret_file")


def _bound(address: Address) -> socket.socket:
    """Return a listening socket. A Unix socket may be used by this user alone, and replaces one without a listener."""
    listener = None
    try:
        if not isinstance(address.place, str):
            return socket.create_server(address.place, family=address.family)
        _remove_stale(address.place)
        listener = socket.socket(socket.AF_UNIX)
        os.fchmod(listener.fileno(), 0o600)  # before `bind` makes the file
        listener.bind(address.place)
        listener.listen()
    except OSError as error:
        if listener is not None:
            listener.close()
        raise ConfigError(f"{address} cannot be listened on: {error}") from error
    return listener


def _remove_stale(path: str) -> None:
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


def _shared_memory(connection: socket.socket) -> Carrier:
    from octavo.pipes.shared_memory_pipe import SharedMemoryCarrier

    return SharedMemoryCarrier(connection)


_CARRIERS: Final[dict[str, Callable[[socket.socket], Carrier]]] = {
    "tcp": SocketCarrier,
    "unix": SocketCarrier,
    "shm": _shared_memory,
}
"""What a connection becomes, by the scheme of its address."""
