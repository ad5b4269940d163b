"""Control connections between engines: proof of the secret, comparison of both engines, messages, heartbeats."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Final

import msgspec

from octavo.core.process import frames
from octavo.core.process.authentication import GREETING_S, authenticate, keep_alive
from octavo.core.process.listening import cut, listen_privately, open_connection
from octavo.errors import ConfigError, OctavoError
from octavo.kv_transfer.messages import Heartbeat, PeerHello, PeerMessage

_HEARTBEATS_PER_LEASE: Final = 6
_MOST_BYTES: Final = 1 << 24
"""Most bytes of a message: the message of a prompt of a million tokens has a quarter of them."""
_MOST_UNSENT: Final = 4096
"""Most messages queued for an engine that does not read; beyond it the connection is closed."""


class PeerRefused(OctavoError):
    """Another engine refuses to exchange KV blocks with this one, or is refused."""


def listen(host: str, port: int, name: str) -> tuple[socket.socket, str]:
    """Return a socket that listens, and its address: "host:port", or the path of a Unix socket.

    host: an address to listen on, or a folder beginning with "/" in which a Unix socket with this name is made. Raises
    ConfigError.
    """
    if host.startswith("/"):
        return _listen_in(host, name)
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, port), family=family)
    except OSError as error:
        raise ConfigError(f"kv_host is {host} and kv_port {port}, where nothing can listen: {error}") from error
    return listener, f"[{host}]:{listener.getsockname()[1]}" if ":" in host else f"{host}:{listener.getsockname()[1]}"


def _listen_in(folder: str, name: str) -> tuple[socket.socket, str]:
    address = f"{folder.rstrip('/')}/{name}"
    try:
        return listen_privately(address), address
    except OSError as error:
        raise ConfigError(f"no socket can be made at {address}: {error}") from error


def open_socket(address: str, timeout_s: float) -> socket.socket:
    """Return a connection to "host:port", or to the path of a Unix socket. Raises OSError."""
    host, _, port = address.rpartition(":")
    return open_connection(address if address.startswith("/") else (host.strip("[]"), int(port)), timeout_s)


def greet(connection: socket.socket, secret: bytes, ours: PeerHello, *, is_listener: bool) -> PeerHello:
    """Exchange the proofs of the secret and a `PeerHello`. Returns that of the other end.

    Raises PeerRefused with the reason; the other end finds the same one.
    """
    connection.settimeout(GREETING_S)
    if not authenticate(connection, secret, is_listener=is_listener):
        raise PeerRefused("it does not know the secret; give both the same cluster_secret_file")
    keep_alive(connection)
    connection.sendall(frames.pack(ours))
    theirs = frames.read_as(connection, PeerHello, _MOST_BYTES)
    if theirs is None:
        raise PeerRefused("it has closed the connection")
    if (because := difference(ours, theirs)) is not None:
        raise PeerRefused(because)
    return theirs


def difference(ours: PeerHello, theirs: PeerHello) -> str | None:
    """Return a text with the first value that must be equal at both ends and is not, with both values; None if all are
    equal."""
    mine, other = (
        {"block size": str(each.block_size), "layout": each.layout} | each.identity for each in (ours, theirs)
    )
    for name in [*mine, *(other.keys() - mine.keys())]:
        here, there = mine.get(name, "nothing"), other.get(name, "nothing")
        if here != there:
            return f"{name.replace('_', ' ')} is {here} here and {there} there; KV of the one is not that of the other"
    return None


class PeerLink:
    """A connection after its greeting, with a thread that writes and one that reads. Either end sends heartbeats, and
    closes the connection when it has received nothing for the length of a lease.
    """

    def __init__(self, connection: socket.socket, lease_s: float) -> None:
        self._connection = connection
        self._heartbeat_s = lease_s / _HEARTBEATS_PER_LEASE
        self._outbox = SimpleQueue[PeerMessage | None]()
        connection.settimeout(lease_s)

    def start(self, receive: Callable[[PeerLink, PeerMessage | None], None]) -> None:
        """Begin to send and to read. receive: called by the reading thread with each message, and last with None for
        the end."""
        reader = threading.Thread(target=self._read, args=[receive], name="octavo-kv-peer", daemon=True)
        try:
            reader.start()
            threading.Thread(target=self._write, args=[reader], name="octavo-kv-peer", daemon=True).start()
        except RuntimeError:  # there can be no more threads
            cut(self._connection)
            if reader.ident is None:
                receive(self, None)
            else:
                reader.join()
            self._connection.close()

    def send(self, message: PeerMessage) -> None:
        """Queue a message. Raises nothing: a broken connection is reported by its end in `receive`."""
        self._outbox.put(message)
        if self._outbox.qsize() > _MOST_UNSENT:
            cut(self._connection)

    def close(self) -> None:
        """Close the connection after the queued messages. Idempotent; any thread."""
        self._outbox.put(None)

    def _write(self, reader: threading.Thread) -> None:
        message: PeerMessage | None = Heartbeat()
        with suppress(OSError):
            while message is not None:
                self._connection.sendall(frames.pack(message))
                try:
                    message = self._outbox.get(timeout=self._heartbeat_s)
                except Empty:
                    message = Heartbeat()
        cut(self._connection)
        reader.join()
        self._connection.close()

    def _read(self, receive: Callable[[PeerLink, PeerMessage | None], None]) -> None:
        decoder = msgspec.msgpack.Decoder(PeerMessage)
        with suppress(ValueError, msgspec.MsgspecError):
            while (body := frames.read(self._connection, _MOST_BYTES)) is not None:
                message = decoder.decode(body)
                if not isinstance(message, Heartbeat):
                    receive(self, message)
        cut(self._connection)
        self.close()
        receive(self, None)
