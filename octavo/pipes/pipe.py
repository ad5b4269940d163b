"""Pipes carry tensors between processes: a bounded, ordered stream in each direction, over a carrier of bytes.

A message is four bytes of length (little-endian), that many bytes of `Metadata`, and the bytes of the tensor. Nothing
that the other end says is believed: lengths, types and shapes are checked before memory is taken.
"""

from __future__ import annotations

import math
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Final, Protocol

import msgspec
import torch
from torch import Tensor

from octavo.errors import PipeClosed, PipeError

DEADLINE_S: Final = 30.0
"""How long a message that has begun may take, unless the pipe is made with another deadline."""
MAX_TENSOR_BYTES: Final = 1 << 30
MAX_HEADER_BYTES: Final = 1 << 20
_MAX_METADATA_BYTES: Final = MAX_HEADER_BYTES + 256
_MAX_DIMENSIONS: Final = 8
_LENGTH: Final = struct.Struct("<I")

DTYPES: Final = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
    )
}
"""The element types that a pipe carries, by name."""


class Pipe(Protocol):
    """A connection whose two ends send and receive. Threads of one direction wait for each other."""

    def send_tensor(self, tensor: Tensor | None, header: bytes = b"") -> None:
        """Send a tensor of any layout, or None, with a header. Waits while the other end does not read.

        Raises PipeClosed, or PipeError when the deadline of the pipe is over; ValueError for what no pipe carries.
        """
        ...

    def recv_tensor(self, wait_s: float | None = None) -> tuple[Tensor | None, bytes]:
        """Return the next tensor, contiguous and in the memory of the processor, and its header.

        wait_s: how long to wait for the message to begin; None without limit. Raises PipeClosed when the other end
        has closed the pipe between two messages, PipeError when a message is late, cut, or not what a pipe carries.
        """
        ...

    def close(self) -> None:
        """End what waits in other threads with PipeClosed, and release the connection. Idempotent; any thread."""
        ...


class Listener(Protocol):
    """Where other processes connect."""

    address: str
    """Where `connect` reaches it; a port 0 is replaced by the port that was chosen."""

    def accept(self, wait_s: float | None = None) -> Pipe:
        """Return a pipe to the next process that has proved the secret.

        Raises PipeClosed when the listener is closed, PipeError when none has come for `wait_s` seconds.
        """
        ...

    def close(self) -> None:
        """Stop listening, and end `accept` in other threads with PipeClosed. Idempotent; accepted pipes stay open."""
        ...


def listen(
    address: str, secret: bytes | None, deadline_s: float = DEADLINE_S, max_bytes: int = MAX_TENSOR_BYTES
) -> Listener:
    """Listen on "tcp://host:port", "unix:///path" or "shm:///path", a Unix socket over which memory is passed.

    secret: what both ends prove that they know; None, not for TCP, relies on the permissions of the socket's file.
    deadline_s, max_bytes: limits of a message of the pipes. Raises ConfigError for an address that cannot be used.
    """
    from octavo.pipes import socket_pipe

    return socket_pipe.SocketListener(address, secret, lambda carrier: CarriedPipe(carrier, deadline_s, max_bytes))


def connect(
    address: str, secret: bytes | None, deadline_s: float = DEADLINE_S, max_bytes: int = MAX_TENSOR_BYTES
) -> Pipe:
    """Return a pipe to a listener, whose address and secret are as in `listen`.

    deadline_s: how long connecting may take, and each message. Raises PipeError when there is no listener, or one
    with another secret; ConfigError for an address that is none.
    """
    from octavo.pipes import socket_pipe

    return CarriedPipe(socket_pipe.connect(address, secret, deadline_s), deadline_s, max_bytes)


class Carrier(Protocol):
    """Moves bytes to the other end, in order. Deadlines are of `time.monotonic`.

    Every method raises PipeClosed when the other end has closed the connection, PipeError when the deadline is over.
    One thread sends and one receives at a time.
    """

    def send(self, head: bytes, body: memoryview, deadline: float) -> None:
        """Send both; `body` is not read after the return."""
        ...

    def receive_head(self, into: memoryview, deadline: float | None) -> None:
        """Fill `into` from the head of a message. PipeClosed is raised only before its first byte."""
        ...

    def receive_body(self, into: memoryview, deadline: float) -> None:
        """Fill `into` with the whole body."""
        ...

    def interrupt(self) -> None:
        """End what waits, at both ends. Idempotent; from any thread."""
        ...

    def close(self) -> None:
        """Release the connection; no other call is being made, and none but `interrupt` follows."""
        ...


class Metadata(msgspec.Struct, frozen=True, array_like=True):
    """What a message has: the tensor's type and shape, None and () without a tensor, and the header."""

    dtype: str | None
    shape: Annotated[tuple[Annotated[int, msgspec.Meta(ge=0)], ...], msgspec.Meta(max_length=_MAX_DIMENSIONS)]
    header: Annotated[bytes, msgspec.Meta(max_length=MAX_HEADER_BYTES)]

    @classmethod
    def of(cls, tensor: Tensor | None, header: bytes) -> Metadata:
        """Raises ValueError for a type, a number of dimensions or a header that no pipe carries."""
        if len(header) > MAX_HEADER_BYTES:
            raise ValueError(f"a header of {len(header)} bytes, at most {MAX_HEADER_BYTES} are sent")
        if tensor is None:
            return cls(None, (), header)
        name = str(tensor.dtype).removeprefix("torch.")
        if name not in DTYPES or tensor.layout != torch.strided:
            raise ValueError(
                f"a tensor of {tensor.dtype}, {tensor.layout}; strided ones of {', '.join(DTYPES)} are sent"
            )
        if tensor.dim() > _MAX_DIMENSIONS:
            raise ValueError(f"a tensor of {tensor.dim()} dimensions, at most {_MAX_DIMENSIONS} are sent")
        return cls(name, tuple(tensor.shape), header)

    def empty(self, max_bytes: int) -> Tensor | None:
        """Return memory for the tensor. Raises PipeError, before memory is taken, unless it has at most `max_bytes`."""
        if self.dtype is None:
            return None
        dtype = DTYPES.get(self.dtype)
        if dtype is None:
            raise PipeError(f"a tensor of type {self.dtype[:40]!r} is announced; {', '.join(DTYPES)} are received")
        # a dimension of 0 does not excuse the others: their strides are computed
        num_bytes = math.prod(max(1, size) for size in self.shape) * dtype.itemsize
        if num_bytes > max_bytes:
            raise PipeError(f"a tensor of {num_bytes} bytes is announced, at most {max_bytes} are received")
        return torch.empty(self.shape, dtype=dtype)


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Metadata).decode


class CarriedPipe:
    """A `Pipe` over a carrier. After a PipeError it can only be closed: what follows in the stream is unknown."""

    def __init__(self, carrier: Carrier, deadline_s: float, max_bytes: int) -> None:
        self._carrier = carrier
        self._deadline_s = deadline_s
        self._max_bytes = max_bytes
        self._sending, self._receiving = threading.Lock(), threading.Lock()
        self._failure: str | None = None
        self._is_closed = False

    def send_tensor(self, tensor: Tensor | None, header: bytes = b"") -> None:
        metadata = _encode(Metadata.of(tensor, header))
        if tensor is not None and tensor.numel() * tensor.element_size() > self._max_bytes:
            raise ValueError(f"a tensor of {tensor.nbytes} bytes, at most {self._max_bytes} are sent")
        body = memoryview(b"") if tensor is None else _bytes_of(tensor.detach().cpu().contiguous())
        with self._one_at_a_time(self._sending):
            deadline = time.monotonic() + self._deadline_s
            self._carrier.send(_LENGTH.pack(len(metadata)) + metadata, body, deadline)

    def recv_tensor(self, wait_s: float | None = None) -> tuple[Tensor | None, bytes]:
        with self._one_at_a_time(self._receiving):
            length = memoryview(bytearray(_LENGTH.size))
            self._carrier.receive_head(length[:1], None if wait_s is None else time.monotonic() + wait_s)
            deadline = time.monotonic() + self._deadline_s
            metadata = self._metadata(length, deadline)
            tensor = metadata.empty(self._max_bytes)
            if tensor is not None:
                body = _bytes_of(tensor)
                self._carrier.receive_body(body, deadline)
                if tensor.dtype == torch.bool and body.tobytes().strip(b"\0\1"):
                    raise PipeError("a tensor of bool has bytes that are neither 0 nor 1")
            return tensor, metadata.header

    def close(self) -> None:
        self._is_closed = True
        self._carrier.interrupt()
        with self._sending, self._receiving:
            self._carrier.close()

    def _metadata(self, length: memoryview, deadline: float) -> Metadata:
        """Return the metadata of a message of whose length the first byte has come."""
        try:
            self._carrier.receive_head(length[1:], deadline)
            (size,) = _LENGTH.unpack(length)
            if size > _MAX_METADATA_BYTES:
                raise PipeError(f"{size} bytes of metadata are announced, at most {_MAX_METADATA_BYTES} are received")
            text = bytearray(size)
            self._carrier.receive_head(memoryview(text), deadline)
            return _decode(text)
        except msgspec.MsgspecError as error:
            raise PipeError(f"what came is not the metadata of a tensor: {error}") from error
        except PipeClosed as error:
            raise PipeError("the pipe was cut in the metadata of a message") from error

    @contextmanager
    def _one_at_a_time(self, lock: threading.Lock) -> Iterator[None]:
        """Keep other threads out of a direction, and make the pipe unusable when it fails."""
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


def _bytes_of(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous tensor."""
    return tensor.view(-1).view(torch.uint8).numpy().data
