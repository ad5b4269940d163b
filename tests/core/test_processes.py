"""The failure of a process, as the one that started it gets it."""

from __future__ import annotations

import socket

import msgspec

from octavo.core import frames
from octavo.core.messages import CoreFailed
from octavo.core.processes import report_failure


def test_process_that_reports_its_failure_leaves_messages_to_the_thread_that_reads_them() -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        with ours:
            ours.sendall(frames.pack("a message"))
            ours.shutdown(socket.SHUT_WR)
            report_failure(theirs, CoreFailed(message="no memory is left"))
            body = frames.read(ours)
        assert body is not None
        assert msgspec.msgpack.decode(body, type=CoreFailed).message == "no memory is left"
        assert frames.read(theirs) == frames.encode("a message")
