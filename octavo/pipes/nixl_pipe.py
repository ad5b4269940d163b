"""Pipes through NIXL (the extra `nixl`): the receiver reads the sender's ring by remote memory access.

Everything else goes over a TCP connection. NIXL's own listener checks no secret: it belongs on a network of its own.
NIXL has no blocking calls, so a read polls for its end at growing intervals of up to a millisecond.
"""

from __future__ import annotations

import secrets
import socket
import time
from contextlib import ExitStack
from typing import Any, Final

import msgspec
import torch

from octavo.core.process import frames
from octavo.core.process.authentication import GREETING_S, keep_alive
from octavo.errors import ConfigError, PipeError
from octavo.pipes.metadata import bytes_of
from octavo.pipes.ring import RING_BYTES, Memory, RingCarrier

_SHORTEST_S: Final = 20e-6
_LONGEST_S: Final = 1e-3


class _Hello(msgspec.Struct, frozen=True, array_like=True):
    """The agent of an end, where its ring is, and the port and the token for the second connection."""

    agent: bytes
    ring: int
    port: int
    token: bytes


def open_nixl(connection: socket.socket, *, is_listener: bool) -> RingCarrier:
    """Exchange the agents' metadata over a connection. Raises ConfigError without NIXL, PipeError or OSError."""
    try:
        from nixl._api import nixl_agent, nixl_agent_config
    except ImportError as error:
        raise ConfigError("pipes over nixl:// need NIXL; install octavo[nixl]") from error
    # a name that was never used: an agent that was started again under its name is refused by those that knew it
    agent = nixl_agent(f"octavo-{secrets.token_hex(8)}", nixl_agent_config(backends=["UCX"]))
    rings = torch.zeros(2 * RING_BYTES, dtype=torch.uint8)  # our ring, and a copy of slots of theirs
    registered = agent.register_memory(rings)
    with ExitStack() as failed:
        failed.callback(agent.deregister_memory, registered)
        with socket.create_server(("", 0), family=connection.family) as server:
            server.settimeout(GREETING_S)
            token = secrets.token_bytes(16)
            port = server.getsockname()[1]
            connection.sendall(frames.pack(_Hello(agent.get_agent_metadata(), rings.data_ptr(), port, token)))
            theirs = frames.read_as(connection, _Hello)
            if theirs is None:
                raise PipeError("the other end has closed the connection")
            if is_listener:
                credits_socket = _accepted(server, token)
            else:
                credits_socket = socket.create_connection((connection.getpeername()[0], theirs.port), GREETING_S)
                credits_socket.sendall(theirs.token)
        failed.callback(credits_socket.close)
        keep_alive(credits_socket)
        memory = _Reading(agent, agent.add_remote_agent(theirs.agent), registered, rings, theirs.ring).memory()
        failed.pop_all()
    return RingCarrier(connection, credits_socket, memory)


def _accepted(server: socket.socket, token: bytes) -> socket.socket:
    """Return the first connection, which has to send the token."""
    credits_socket, _ = server.accept()
    credits_socket.settimeout(GREETING_S)
    if frames.read_exactly(credits_socket, len(token)) != token:
        credits_socket.close()
        raise PipeError("another process has taken the second connection")
    return credits_socket


class _Reading:
    """Reads slots of the ring of another agent."""

    def __init__(self, agent: Any, peer: str, registered: Any, rings: torch.Tensor, ring: int) -> None:
        self._agent, self._peer, self._registered, self._ring = agent, peer, registered, ring
        self._rings = rings
        self._slots = bytes_of(rings)[RING_BYTES:]

    def memory(self) -> Memory:
        return Memory(bytes_of(self._rings)[:RING_BYTES], self.read, self.release, outlives_sender=False)

    def read(self, offset: int, into: memoryview, deadline: float) -> None:
        agent, num_bytes = self._agent, len(into)
        here = agent.get_xfer_descs([(self._rings.data_ptr() + RING_BYTES + offset, num_bytes, 0)], "DRAM")
        there = agent.get_xfer_descs([(self._ring + offset, num_bytes, 0)], "DRAM")
        handle = None
        try:
            handle = agent.initialize_xfer("READ", here, there, self._peer)
            state, pause_s = agent.transfer(handle), _SHORTEST_S
            while state == "PROC":
                if time.monotonic() > deadline:
                    raise PipeError("NIXL has not read the memory of the other end within the deadline")
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, _LONGEST_S)
                state = agent.check_xfer_state(handle)
        except PipeError:
            raise
        except Exception as error:  # NIXL's have no common class
            raise PipeError(f"the pipe was cut while NIXL read a tensor: {type(error).__name__}: {error}") from error
        finally:
            if handle is not None:
                agent.release_xfer_handle(handle)
        if state != "DONE":
            raise PipeError(f"NIXL could not read the memory of the other end: {state}")
        into[:] = self._slots[offset : offset + num_bytes]

    def release(self) -> None:
        self._agent.remove_remote_agent(self._peer)
        self._agent.deregister_memory(self._registered)
