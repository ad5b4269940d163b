"""Frames between processes: four bytes of length (little-endian), then that many bytes of MessagePack."""

from __future__ import annotations

import socket
import struct
from typing import TYPE_CHECKING, Any, Final, TypeVar

import msgspec

if TYPE_CHECKING:  # a core reads no stream
    import asyncio

T = TypeVar("T")

_LENGTH: Final = struct.Struct("<I")

MAX_BYTES: Final = 1 << 28
"""Largest body that is read: more is no message, but another protocol or a damaged connection."""

encode = msgspec.msgpack.Encoder().encode


def pack(message: Any) -> bytes:
    """Return the frame of a message."""
    body = encode(message)
    return _LENGTH.pack(len(body)) + body


def head(num_bytes: int) -> bytes:
    """Return what stands before a body of this size, for a body that is not copied into a frame."""
    return _LENGTH.pack(num_bytes)


def read(connection: socket.socket, max_bytes: int = MAX_BYTES) -> bytes | None:
    """Wait for the next frame and return its body; None when the connection is closed at either end.

    Raises ValueError for a body of more than `max_bytes`.
    """
    length = read_exactly(connection, _LENGTH.size)
    if length is None:
        return None
    (size,) = _LENGTH.unpack(length)
    if size > max_bytes:
        raise ValueError(f"a frame of {size} bytes, at most {max_bytes} are expected")
    return read_exactly(connection, size)


def read_as(connection: socket.socket, kind: type[T], max_bytes: int = MAX_BYTES) -> T | None:
    """Wait for the next frame and return its message, which is a `kind`; raises as `read`, and msgspec's errors."""
    body = read(connection, max_bytes)
    return None if body is None else msgspec.msgpack.decode(body, type=kind)


async def read_async(reader: asyncio.StreamReader) -> bytes | None:
    """Return the body of the next frame from an asyncio stream; None when the connection is closed or lost."""
    try:
        length = await reader.readexactly(_LENGTH.size)
        return await reader.readexactly(_LENGTH.unpack(length)[0])
    except (EOFError, OSError):  # a machine that has vanished is a TimeoutError, or has no route
        return None


def read_exactly(connection: socket.socket, size: int) -> bytes | None:
    """Wait for as many bytes; None when the connection is closed before."""
    body = bytearray(size)
    view = memoryview(body)
    while view:
        try:
            count = connection.recv_into(view)
        except OSError:
            return None
        if count == 0:
            return None
        view = view[count:]
    return bytes(body)
