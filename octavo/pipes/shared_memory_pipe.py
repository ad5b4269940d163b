"""Pipes through memory that two processes of a machine share.

Each end makes the memory that it writes, sealed at its size, so that the reader can rely on it, and passes it through
the Unix socket that joins both ends.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import socket
import stat
from contextlib import ExitStack
from typing import Final

from octavo.errors import PipeError
from octavo.pipes.ring import RING_BYTES, Memory, RingCarrier

SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


def open_shared_memory(connection: socket.socket, *, is_listener: bool) -> RingCarrier:
    """Exchange memory over a Unix socket. The connecting end makes the second socket.

    Raises PipeError or OSError when the other end passes no such memory.
    """
    with ExitStack() as passed, ExitStack() as failed:
        descriptor = os.memfd_create("octavo-pipe", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        passed.callback(os.close, descriptor)
        os.ftruncate(descriptor, RING_BYTES)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, SEALS)
        descriptors = [descriptor]
        if not is_listener:
            credits_socket, theirs = socket.socketpair()
            failed.callback(credits_socket.close)
            descriptors.append(passed.enter_context(theirs).fileno())
        socket.send_fds(connection, [b"m"], descriptors)
        found = _received(connection, 1 + is_listener)
        for each in found:
            passed.callback(os.close, each)
        if is_listener:
            credits_socket = socket.socket(fileno=os.dup(found[1]))
            failed.callback(credits_socket.close)
        memory = _memory(mmap.mmap(descriptor, RING_BYTES), mmap.mmap(found[0], RING_BYTES, prot=mmap.PROT_READ))
        failed.pop_all()
    return RingCarrier(connection, credits_socket, memory)


def _received(connection: socket.socket, count: int) -> list[int]:
    """Return the descriptors that the other end passes, the first of which is the memory that it writes."""
    _, descriptors, _, _ = socket.recv_fds(connection, 1, count)
    try:
        if len(descriptors) != count:
            raise PipeError(f"the other end has passed {len(descriptors)} descriptors, not {count}")
        if not all(stat.S_ISSOCK(os.fstat(descriptor).st_mode) for descriptor in descriptors[1:]):
            raise PipeError("the other end has passed what is no socket")
        size, seals = os.fstat(descriptors[0]).st_size, fcntl.fcntl(descriptors[0], fcntl.F_GET_SEALS)
        if size != RING_BYTES or seals & SEALS != SEALS:
            raise PipeError(f"the other end has passed {size} bytes with seals {seals}, not {RING_BYTES} with {SEALS}")
    except BaseException:
        for descriptor in descriptors:
            os.close(descriptor)
        raise
    return descriptors


def _memory(ours: mmap.mmap, theirs: mmap.mmap) -> Memory:
    written, ring = memoryview(ours), memoryview(theirs)

    def read(offset: int, into: memoryview, deadline: float) -> None:
        into[:] = ring[offset : offset + len(into)]

    def release() -> None:
        for each in (written, ring):
            each.release()
        for mapped in (ours, theirs):
            mapped.close()

    return Memory(written, read, release, outlives_sender=True)
