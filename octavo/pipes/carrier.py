"""The interface of what moves the bytes of a pipe."""

from __future__ import annotations

from typing import Protocol


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
