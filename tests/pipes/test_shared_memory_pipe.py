"""Memory that another process passes is mapped only when it cannot shrink, and no descriptor stays behind."""

from __future__ import annotations

import fcntl
import os
import socket
from collections.abc import Iterator

import pytest
import torch

from octavo.errors import PipeClosed, PipeError
from octavo.pipes.ring import RING_BYTES
from octavo.pipes.shared_memory_pipe import SEALS, open_shared_memory
from tests.pipes.ends import Ends, Running


@pytest.fixture
def sockets() -> Iterator[tuple[socket.socket, socket.socket]]:
    both = socket.socketpair()
    for each in both:
        each.settimeout(100)
    yield both
    for each in both:
        each.close()


def memory(size: int = RING_BYTES, seals: int = SEALS) -> int:
    descriptor = os.memfd_create("passed", os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, size)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    return descriptor


def num_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize(
    ("size", "seals"), [(4096, SEALS), (RING_BYTES, fcntl.F_SEAL_GROW), (RING_BYTES, SEALS & ~fcntl.F_SEAL_SHRINK)]
)
def test_memory_that_may_vanish_is_refused(sockets: tuple[socket.socket, socket.socket], size: int, seals: int) -> None:
    near, far = sockets
    before = num_descriptors()
    passed = memory(size, seals)
    socket.send_fds(far, [b"m"], [passed, far.fileno()])
    os.close(passed)
    with pytest.raises(PipeError, match=f"{size} bytes with seals {seals}"):
        open_shared_memory(near, is_listener=True)
    far.recv(1)  # and with it the descriptors that `near` has passed
    assert num_descriptors() == before


def test_what_is_no_memory_or_no_socket_is_refused(sockets: tuple[socket.socket, socket.socket]) -> None:
    near, far = sockets
    before = num_descriptors()
    ring = memory()
    for passed in ([far.fileno(), far.fileno()], [ring, ring], [ring], []):
        if passed:
            socket.send_fds(far, [b"m"], passed)
        else:
            far.send(b"m")
        with pytest.raises((PipeError, OSError)):
            open_shared_memory(near, is_listener=True)
        far.recv(1)
    os.close(ring)
    assert num_descriptors() == before


def test_a_pipe_leaves_no_descriptors_behind() -> None:
    Ends("shm").close()
    before = num_descriptors()
    for _ in range(5):
        ends = Ends("shm")
        send = Running(lambda ends=ends: ends.near.send_tensor(torch.zeros(1 << 20)))  # type: ignore[misc]
        ends.far.recv_tensor()
        send.result()
        ends.close()
    assert num_descriptors() == before


def test_what_was_sent_before_the_end_is_read_from_memory() -> None:
    """The ring outlives the process that has written it."""
    ends = Ends("shm")
    sent = torch.arange(200_000)
    ends.near.send_tensor(sent)
    ends.near.close()
    received, _ = ends.far.recv_tensor()
    assert received is not None
    assert torch.equal(received, sent)
    with pytest.raises(PipeClosed):
        ends.far.recv_tensor()
    ends.close()
