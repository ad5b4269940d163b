"""Pipes carry tensors between processes: a bounded, ordered stream in each direction, over a carrier of bytes.

A message is four bytes of length (little-endian), that many bytes of `Metadata`, and the bytes of the tensor. Either
end proves that it knows a secret before anything else is read.
"""

from __future__ import annotations

import logging
import os
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from queue import Empty, SimpleQueue
from typing import Final

import msgspec
import torch
from torch import Tensor

from octavo.core.process.authentication import GREETING_S, authenticate, keep_alive
from octavo.core.process.listening import Greetings, cut, in_time, listen_privately, open_connection
from octavo.errors import ConfigError, PipeClosed, PipeError
from octavo.pipes.address import SCHEMES, Address
from octavo.pipes.carrier import Carrier
from octavo.pipes.metadata import MAX_METADATA_BYTES, Metadata, bytes_of

DEADLINE_S: Final = 30.0
"""Seconds that a message may take once it has begun, unless the pipe is made with another deadline."""
MAX_TENSOR_BYTES: Final = 1 << 30
_LENGTH: Final = struct.Struct("<I")

_log = logging.getLogger(__name__)
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Metadata).decode


class Pipe:
    """A connection whose two ends send and receive. Threads that use the same direction take turns.

    After a PipeError it can only be closed: what follows in the stream is unknown.
    """

    def __init__(self, carrier: Carrier, deadline_s: float, max_bytes: int) -> None:
        self._carrier = carrier
        self._deadline_s = deadline_s
        self._max_bytes = max_bytes
        self._sending, self._receiving = threading.Lock(), threading.Lock()
        self._failure: str | None = None
        self._is_closed = self._is_released = False

    def send_tensor(self, tensor: Tensor | None, header: bytes = b"") -> None:
        """Send a tensor of any layout, or None, with a header. Waits while the other end does not read. Raises
        PipeClosed, PipeError after the pipe's deadline, and ValueError for a tensor or header that pipes do not
        support.
        """
        metadata = _encode(Metadata.of(tensor, header, self._max_bytes))
        body = memoryview(b"") if tensor is None else bytes_of(tensor.detach().cpu().contiguous())
        with self._one_at_a_time(self._sending):
            deadline = time.monotonic() + self._deadline_s
            self._carrier.send(_LENGTH.pack(len(metadata)) + metadata, body, deadline)

    def recv_tensor(self, wait_s: float | None = None) -> tuple[Tensor | None, bytes]:
        """Return the next tensor, contiguous and in the memory of the processor, and its header.

        wait_s: how long to wait for the message to begin; None without limit. Raises PipeClosed when the other end
        has closed the pipe between two messages, PipeError when a message is late, cut, or not what a pipe carries.
        """
        with self._one_at_a_time(self._receiving):
            length = memoryview(bytearray(_LENGTH.size))
            self._carrier.receive_head(length[:1], None if wait_s is None else time.monotonic() + wait_s)
            deadline = time.monotonic() + self._deadline_s
            metadata = self._metadata(length, deadline)
            tensor = metadata.empty(self._max_bytes)
            if tensor is not None:
                body = bytes_of(tensor)
                self._carrier.receive_body(body, deadline)
                if tensor.dtype == torch.bool and body.tobytes().strip(b"\0\1"):
                    raise PipeError("a tensor of bool has bytes that are neither 0 nor 1")
            return tensor, metadata.header

    def close(self) -> None:
        """End calls that wait in other threads with PipeClosed, and release the connection. Idempotent; any thread."""
        self._is_closed = True
        self._carrier.interrupt()
        with self._sending, self._receiving:
            if not self._is_released:
                self._is_released = True
                self._carrier.close()

    def _metadata(self, length: memoryview, deadline: float) -> Metadata:
        """Return the metadata of a message; the first byte of its length was received before."""
        try:
            self._carrier.receive_head(length[1:], deadline)
            (size,) = _LENGTH.unpack(length)
            if size > MAX_METADATA_BYTES:
                raise PipeError(f"{size} bytes of metadata are announced, at most {MAX_METADATA_BYTES} are received")
            text = bytearray(size)
            self._carrier.receive_head(memoryview(text), deadline)
            return _decode(text)
        except msgspec.MsgspecError as error:
            raise PipeError(f"what came is not the metadata of a tensor: {error}") from error
        except PipeClosed as error:
            raise PipeError("the pipe was cut in the metadata of a message") from error

    @contextmanager
    def _one_at_a_time(self, lock: threading.Lock) -> Iterator[None]:
        """Allow one thread at a time in a direction, and make the pipe unusable after a failure."""
        with lock:
            try:
                if self._is_closed:
                    raise PipeClosed("this end of the pipe is closed")
                if self._failure is not None:
                    raise PipeError(f"the pipe has failed: {self._failure}")
                yield
            except BaseException as error:
                if self._is_closed and isinstance(error, PipeError):
                    raise PipeClosed("this end of the pipe is closed") from error
                if not isinstance(error, PipeClosed):
                    self._failure = self._failure or str(error)
                    self._carrier.interrupt()
                raise


def connect(
    address: str, secret: bytes | None, deadline_s: float = DEADLINE_S, max_bytes: int = MAX_TENSOR_BYTES
) -> Pipe:
    """Return a pipe to a listener, whose address and secret are as in `Listener`.

    deadline_s: seconds that connecting may take, and each message. Raises PipeError when there is no listener, or one
    with another secret; ConfigError for an invalid address.
    """
    parsed = Address.parse(address, secret)
    try:
        connection = open_connection(parsed.place, deadline_s)
        with in_time(connection):
            return Pipe(_greeted(connection, parsed, secret, is_listener=False), deadline_s, max_bytes)
    except OSError as error:
        raise PipeError(f"{address} cannot be reached: {error}") from error


class Listener:
    """Accepts connections of other processes. Each proves the secret in a thread of its own, so that others need not
    wait."""

    address: str
    """The address for `connect`; a port 0 is replaced by the port that was chosen."""

    def __init__(
        self, address: str, secret: bytes | None, deadline_s: float = DEADLINE_S, max_bytes: int = MAX_TENSOR_BYTES
    ) -> None:
        """Listen on an `Address`. secret: both ends prove that they know it; None, for Unix sockets only, relies on the
        permissions of the socket's file. deadline_s, max_bytes: limits of a message of the pipes.

        Raises ConfigError for an address that cannot be used.
        """
        self._secret, self._limits = secret, (deadline_s, max_bytes)
        self._parsed = Address.parse(address, secret)
        self._listener = _bound(self._parsed)
        if not isinstance(self._parsed.place, str):
            self._parsed = self._parsed._replace(place=self._listener.getsockname()[:2])
        self.address = str(self._parsed)
        self._greetings = Greetings()
        self._pipes: SimpleQueue[Pipe | None] = SimpleQueue()
        self._is_closed = False
        self._greetings.begin(self._listener, self._greet, "octavo-greeting")

    def accept(self, wait_s: float | None = None) -> Pipe:
        """Return a pipe to the next process that has proved the secret.

        Raises PipeClosed when the listener is closed, PipeError when none has come for `wait_s` seconds.
        """
        try:
            pipe = self._pipes.get(timeout=wait_s)
        except Empty:
            raise PipeError(f"no process has connected to {self.address} within {wait_s:g} s") from None
        if pipe is None:
            self._pipes.put(None)  # put back for other threads and later calls
            raise PipeClosed(f"{self.address} is closed")
        return pipe

    def close(self) -> None:
        """Stop listening, and end `accept` in other threads with PipeClosed. Idempotent; accepted pipes stay open."""
        if self._is_closed:
            return
        self._is_closed = True
        cut(self._listener)  # wakes the thread that accepts
        self._listener.close()
        if isinstance(self._parsed.place, str):
            with suppress(FileNotFoundError):
                os.unlink(self._parsed.place)
        self._end_accepting()

    def _end_accepting(self) -> None:
        """Close pipes that were not accepted, so that `accept` finds only the end."""
        with suppress(Empty):
            while True:
                if (pipe := self._pipes.get_nowait()) is not None:
                    pipe.close()
        self._pipes.put(None)

    def _greet(self, connection: socket.socket) -> None:
        try:
            with self._greetings.limited(connection):
                carrier = _greeted(connection, self._parsed, self._secret, is_listener=True)
            self._pipes.put(Pipe(carrier, *self._limits))
            if self._is_closed:  # `close` may have emptied the queue before
                self._end_accepting()
        except Exception as error:  # also errors of libraries about data of the other end
            _log.warning("a connection to %s was refused: %s", self.address, error)


def _greeted(connection: socket.socket, address: Address, secret: bytes | None, *, is_listener: bool) -> Carrier:
    """Return the carrier of a connection whose other end has proved the secret; else close it, and raise PipeError or
    OSError."""
    try:
        connection.settimeout(GREETING_S)
        if secret is not None and not authenticate(connection, secret, is_listener=is_listener):
            raise PipeError(f"the other end of {address} does not know the secret")
        keep_alive(connection)
        return SCHEMES[address.scheme].open_carrier(connection, is_listener=is_listener)
    except BaseException:
        connection.close()
        raise


def _bound(address: Address) -> socket.socket:
    try:
        if isinstance(address.place, str):
            return listen_privately(address.place)
        return socket.create_server(address.place, family=address.family)
    except OSError as error:
        raise ConfigError(f"{address} cannot be listened on: {error}") from error
