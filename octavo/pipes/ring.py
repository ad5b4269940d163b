"""A carrier that passes large bodies through a ring of slots in the sender's memory, which the receiver can read."""

from __future__ import annotations

import select
import socket
from collections.abc import Callable
from contextlib import suppress
from typing import Final, NamedTuple

from octavo.core.process.listening import cut
from octavo.errors import PipeClosed, PipeError
from octavo.pipes.socket_pipe import SocketCarrier, wait_for

SLOT_BYTES: Final = 1 << 20
NUM_SLOTS: Final = 4
"""Slots of a ring. The ring is small enough for the processor's caches; smaller slots would wake both ends more
often."""
RING_BYTES: Final = SLOT_BYTES * NUM_SLOTS
_RETURN_SLOTS: Final = NUM_SLOTS // 2
"""Emptied slots that are returned together, so that the sender is not woken for each."""
_SMALL_BYTES: Final = 1 << 14
"""Bodies with fewer bytes go through the socket."""
_FILLED: Final = b"f"


class Memory(NamedTuple):
    """The rings of both directions.

    written: the ring of this end. read: copies from an offset in the ring of the other end, before a deadline.
    release: releases the memory of both. outlives_sender: whether the ring can be read after its owner has closed it.
    """

    written: memoryview
    read: Callable[[int, memoryview, float], None]
    release: Callable[[], None]
    outlives_sender: bool


class RingCarrier:
    """A `Carrier`: heads go through one socket, and a byte for each slot that is filled; the other socket has a byte,
    a credit, for each slot that is emptied. Both ends sleep while they wait."""

    def __init__(self, connection: socket.socket, credits_socket: socket.socket, memory: Memory) -> None:
        self._socket = SocketCarrier(connection)
        credits_socket.setblocking(False)
        self._credits = credits_socket
        self._memory = memory
        self._num_credits = NUM_SLOTS
        self._next_written, self._next_read = 0, 0

    def send(self, head: bytes, body: memoryview, deadline: float) -> None:
        if len(body) <= _SMALL_BYTES:
            self._socket.send(head, body, deadline)
            return
        for start in range(0, len(body), SLOT_BYTES):
            if self._num_credits == 0:
                self._wait_for_credits(deadline)
            self._num_credits -= 1
            chunk = body[start : start + SLOT_BYTES]
            place = self._next_written * SLOT_BYTES
            self._memory.written[place : place + len(chunk)] = chunk
            self._next_written = (self._next_written + 1) % NUM_SLOTS
            self._socket.send(head + _FILLED, memoryview(b""), deadline)
            head = b""
        while not self._memory.outlives_sender and self._num_credits < NUM_SLOTS:
            self._wait_for_credits(deadline)

    def receive_head(self, into: memoryview, deadline: float | None) -> None:
        self._socket.receive_head(into, deadline)

    def receive_body(self, into: memoryview, deadline: float) -> None:
        if len(into) <= _SMALL_BYTES:
            self._socket.receive_body(into, deadline)
            return
        num_emptied = 0
        filled = bytearray(len(_FILLED))
        for start in range(0, len(into), SLOT_BYTES):
            self._socket.receive_body(memoryview(filled), deadline)
            if filled != _FILLED:
                raise PipeError("the other end of the pipe has sent no mark of a filled slot")
            self._memory.read(self._next_read * SLOT_BYTES, into[start : start + SLOT_BYTES], deadline)
            self._next_read = (self._next_read + 1) % NUM_SLOTS
            num_emptied += 1
            if num_emptied == _RETURN_SLOTS or start + SLOT_BYTES >= len(into):
                # the other end may have closed after its last message; without credits its sends meet their deadline
                with suppress(OSError):
                    self._credits.send(b"e" * num_emptied, socket.MSG_NOSIGNAL)
                num_emptied = 0

    def interrupt(self) -> None:
        self._socket.interrupt()
        cut(self._credits)

    def close(self) -> None:
        self._socket.close()
        self._credits.close()
        self._memory.release()

    def _wait_for_credits(self, deadline: float) -> None:
        while True:
            try:
                found = self._credits.recv(NUM_SLOTS)
            except BlockingIOError:
                wait_for(self._credits, select.POLLIN, deadline, "read")
                continue
            except OSError:
                found = b""
            if not found:
                raise PipeClosed("the other end of the pipe has closed it")
            self._num_credits += len(found)
            return
