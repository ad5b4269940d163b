"""Pipes through a stream socket: over TCP, or a Unix socket of this machine."""

from __future__ import annotations

import select
import socket
import time

from octavo.core.process.listening import cut
from octavo.errors import PipeClosed, PipeError


def open_socket(connection: socket.socket, *, is_listener: bool) -> SocketCarrier:
    """Return the carrier that is the connection itself; both ends do the same."""
    return SocketCarrier(connection)


class SocketCarrier:
    """A `Carrier` that sends heads and bodies through a connected socket."""

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
