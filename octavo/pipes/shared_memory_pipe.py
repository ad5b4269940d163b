"""Pipes through memory that two processes of a machine share: a ring of slots for each direction.

Each end makes the memory that it writes, sealed at its size, so that the reader can rely on it, and passes it through
the Unix socket that joins both ends.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import select
import socket
from contextlib import ExitStack, suppress
from typing import Final

from octavo.errors import PipeClosed, PipeError
from octavo.pipes.socket_pipe import SocketCarrier, cut, wait_for

SLOT_BYTES: Final = 1 << 20
NUM_SLOTS: Final = 4
"""A ring that stays in the caches of a processor, so that only the tensors themselves are in memory; smaller slots wake
both ends more often."""
_RETURN_SLOTS: Final = NUM_SLOTS // 2
"""Emptied slots are returned in groups, so that the sender is not woken for each."""
_SMALL_BYTES: Final = 1 << 14
"""Smaller bodies go through the socket."""
_RING_BYTES: Final = SLOT_BYTES * NUM_SLOTS
_FILLED: Final = b"f"
_SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class SharedMemoryCarrier:
    """A `Carrier` that sends heads through the socket, and bodies through memory.

    The socket has a byte for each slot that is filled. A second socket of the direction has one for each slot that is
    emptied: a credit. Both ends sleep while they wait.
    """

    def __init__(self, connection: socket.socket) -> None:
        """`connection` is a Unix socket. Raises PipeError or OSError when the other end passes no such memory."""
        with ExitStack() as undo:  # of what is open when the exchange fails
            self._credits, theirs = (undo.enter_context(each) for each in socket.socketpair())
            self._written, memory = _made()
            undo.callback(self._written.close)
            try:
                socket.send_fds(connection, [b"m"], [memory, theirs.fileno()])
            finally:
                os.close(memory)
            self._read, self._emptied = _received(connection)
            theirs.close()
            undo.pop_all()
        self._credits.setblocking(False)
        self._emptied.setblocking(False)
        self._socket = SocketCarrier(connection)
        self._num_credits = NUM_SLOTS
        self._next_written, self._next_read = 0, 0

    def send(self, head: bytes, body: memoryview, deadline: float) -> None:
        if len(body) <= _SMALL_BYTES:
            self._socket.send(head, body, deadline)
            return
        marks = head
        for start in range(0, len(body), SLOT_BYTES):
            if self._num_credits == 0:
                self._num_credits = self._wait_for_credits(deadline)
            self._num_credits -= 1
            chunk = body[start : start + SLOT_BYTES]
            place = self._next_written * SLOT_BYTES
            self._written[place : place + len(chunk)] = chunk
            self._next_written = (self._next_written + 1) % NUM_SLOTS
            self._socket.send(marks + _FILLED, memoryview(b""), deadline)
            marks = b""

    def receive_head(self, into: memoryview, deadline: float | None) -> None:
        self._socket.receive_head(into, deadline)

    def receive_body(self, into: memoryview, deadline: float) -> None:
        if len(into) <= _SMALL_BYTES:
            self._socket.receive_body(into, deadline)
            return
        num_emptied = 0
        filled = memoryview(bytearray(1))
        with memoryview(self._read) as ring:
            for start in range(0, len(into), SLOT_BYTES):
                self._socket.receive_body(filled, deadline)
                if filled.obj != _FILLED:
                    raise PipeError("the other end of the pipe has sent no mark of a filled slot")
                chunk = into[start : start + SLOT_BYTES]
                place = self._next_read * SLOT_BYTES
                chunk[:] = ring[place : place + len(chunk)]
                self._next_read = (self._next_read + 1) % NUM_SLOTS
                num_emptied += 1
                if num_emptied == _RETURN_SLOTS:
                    self._return(num_emptied)
                    num_emptied = 0
        self._return(num_emptied)

    def interrupt(self) -> None:
        self._socket.interrupt()
        cut(self._credits)
        cut(self._emptied)

    def close(self) -> None:
        self._socket.close()
        self._credits.close()
        self._emptied.close()
        self._written.close()
        self._read.close()

    def _wait_for_credits(self, deadline: float) -> int:
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
            return len(found)

    def _return(self, num_slots: int) -> None:
        # the other end may have gone after its last message, or may not read credits: it only harms itself
        with suppress(OSError):
            self._emptied.send(b"e" * num_slots, socket.MSG_NOSIGNAL)


def _made() -> tuple[mmap.mmap, int]:
    """Return memory of a ring, and its descriptor."""
    memory = os.memfd_create("octavo-pipe", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(memory, _RING_BYTES)
    fcntl.fcntl(memory, fcntl.F_ADD_SEALS, _SEALS)
    return mmap.mmap(memory, _RING_BYTES), memory


def _received(connection: socket.socket) -> tuple[mmap.mmap, socket.socket]:
    """Return the memory that the other end writes, and the socket through which it waits for credits."""
    _, descriptors, _, _ = socket.recv_fds(connection, 1, 2)
    try:
        if len(descriptors) != 2:
            raise PipeError(f"the other end has passed {len(descriptors)} descriptors, 2 are expected")
        memory = descriptors[0]
        size, seals = os.fstat(memory).st_size, fcntl.fcntl(memory, fcntl.F_GET_SEALS)
        if size != _RING_BYTES or seals & _SEALS != _SEALS:
            raise PipeError(
                f"the other end has passed {size} bytes with seals {seals}, not {_RING_BYTES} with {_SEALS}"
            )
        written = mmap.mmap(memory, size, prot=mmap.PROT_READ)
        emptied = socket.socket(fileno=descriptors[1])
        descriptors.pop()  # the socket has it now
        return written, emptied
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
