"""The interface of the carrier of a pipe's bytes, and the carrier over a stream socket."""

from __future__ import annotations

import select
import socket
import time
from typing import Protocol

from octavo.core.listening import cut
from octavo.errors import PipeClosed, PipeError


class Carrier(Protocol):
    """Moves bytes to the other end, in order. Deadlines are of `time.monotonic`.

    Every method raises PipeClosed when the other end has closed the connection, PipeError when the deadline is over.
    One thread sends and one receives at a time.
    """

    def send(self, head: bytes, body: memoryview, deadline: float) -> None:
        """Send `head` and `body`; `body` is not read after the return."""

    def receive_head(self, into: memoryview, deadline: float | None) -> None:
        """Fill `into` from the head of a message. PipeClosed is raised only before its first byte."""

    def receive_body(self, into: memoryview, deadline: float) -> None:
        """Fill `into` with the whole body."""

    def interrupt(self) -> None:
        """End waiting calls at both ends. Idempotent; from any thread."""

    def close(self) -> None:
        """Release the connection; no other call is being made, and none but `interrupt` follows."""


class SocketCarrier:
    """Sends heads and bodies through a connected socket."""

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
            raise PipeError("the pipe was cut in a tensor") from error

    def interrupt(self) -> None:
        cut(self._connection)

    def close(self) -> None:
        self._connection.close()


def wait_for(connection: socket.socket, event: int, deadline: float | None, what: str) -> None:
    """Wait until a socket can be read or written. Raises PipeError after the deadline. what: the missing action of the
    other end, for the message."""
    poll = select.poll()
    poll.register(connection, event)
    remaining = None if deadline is None else (deadline - time.monotonic()) * 1000
    if (remaining is not None and remaining <= 0) or not poll.poll(remaining):
        raise PipeError(f"the other end of the pipe has {what} nothing within the deadline")
