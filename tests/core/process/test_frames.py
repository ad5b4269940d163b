"""Frames: messages of any size arrive whole, and an end in the middle of one is an end."""

from __future__ import annotations

import asyncio
import errno
import socket
import threading

import msgspec
import pytest

from octavo.core.process import frames


def test_messages_arrive_whole_and_in_order() -> None:
    ours, theirs = socket.socketpair()
    messages = [b"", b"x" * 3_000_000, b"y"]
    sender = threading.Thread(target=lambda: [ours.sendall(frames.pack(message)) for message in messages])
    sender.start()
    with ours, theirs:
        received = [frames.read(theirs) for _ in messages]
        sender.join()
    assert [body and msgspec.msgpack.decode(body) for body in received] == messages


def test_end_of_the_connection_is_the_end_of_messages() -> None:
    for last in (b"", frames.pack("abc")[:3], frames.pack("abc")[:-1]):
        ours, theirs = socket.socketpair()
        with ours, theirs:
            ours.sendall(last)
            ours.close()
            assert frames.read(theirs) is None


@pytest.mark.anyio
async def test_event_loop_reads_the_same_frames() -> None:
    ours, theirs = socket.socketpair()
    with ours:
        ours.sendall(frames.pack("abc") + frames.pack("de")[:3])
    reader, writer = await asyncio.open_connection(sock=theirs)
    body = await frames.read_async(reader)
    assert body is not None
    assert msgspec.msgpack.decode(body) == "abc"
    assert await frames.read_async(reader) is None
    writer.close()


@pytest.mark.anyio
@pytest.mark.parametrize("code", [errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ECONNRESET])
async def test_a_machine_that_vanishes_ends_the_connection(code: int) -> None:
    reader = asyncio.StreamReader()
    reader.set_exception(OSError(code, "as the event loop does"))
    assert await frames.read_async(reader) is None
