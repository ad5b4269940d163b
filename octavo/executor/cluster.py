"""Ranks on several machines: they come to the first machine over TCP, and both ends prove that they know a secret."""

from __future__ import annotations

import logging
import socket
import threading
import time
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Final

import msgspec

from octavo.core.messages import CoreFailed
from octavo.core.process import frames
from octavo.core.process.authentication import GREETING_S, authenticate, introduce, keep_alive
from octavo.core.process.listening import Greetings, cut
from octavo.errors import ConfigError, EngineDeadError
from octavo.executor.multiprocess import Rank

_RETRY_S: Final = 0.25

_log = logging.getLogger(__name__)


class Join(msgspec.Struct, frozen=True):
    """The request of a process to be rank number `index` of those on machine `node`."""

    node: int
    index: int


class Joined(msgspec.Struct, frozen=True, tag="joined"):
    """The rank that it is, out of as many ranks as a machine has."""

    rank: int
    ranks_per_node: int


class Gathering:
    """Listens for the ranks of other machines until all have come."""

    def __init__(self, address: str, port: int, secret: bytes, ranks_per_node: int, nodes: range) -> None:
        """Raises ConfigError for an address that cannot be listened on. nodes: the machines that are to come."""
        self._secret = secret
        self._ranks_per_node = ranks_per_node
        self._missing = {node * ranks_per_node + index for node in nodes for index in range(ranks_per_node)}
        self._num_expected = len(self._missing)
        self._joined: SimpleQueue[Rank] = SimpleQueue()
        self._refused: set[str] = set()
        self._lock = threading.Lock()
        self._where = f"{address}:{port}"
        try:
            self._listener = socket.create_server((address, port))
        except OSError as error:
            raise ConfigError(
                f"master_addr and master_port are {self._where}, which cannot be used: {error}"
            ) from error
        self._greetings = Greetings()
        self._greetings.begin(self._listener, self._admit, "octavo-gathering")

    def wait(self, timeout_s: float) -> list[Rank]:
        """Return the ranks in their order. Raises EngineDeadError that lists those that have not come in time."""
        deadline = time.monotonic() + timeout_s
        ranks: dict[int, Rank] = {}
        try:
            while len(ranks) < self._num_expected:
                rank = self._joined.get(timeout=max(0.0, deadline - time.monotonic()))
                ranks[rank.number] = rank
        except Empty:
            for rank in ranks.values():
                rank.connection.close()
            raise EngineDeadError(self._absence(timeout_s)) from None
        finally:
            cut(self._listener)  # wakes the thread that accepts
            self._listener.close()
        return [ranks[number] for number in sorted(ranks)]

    def _absence(self, timeout_s: float) -> str:
        nodes = sorted({number // self._ranks_per_node for number in self._missing})
        missing = ", ".join(map(str, sorted(self._missing)))
        refused = f"; without the secret came {', '.join(sorted(self._refused))}" if self._refused else ""
        return (
            f"after {timeout_s:g} s ranks are missing: {missing}, of node {', '.join(map(str, nodes))}{refused}; start "
            f"`octavo rank` there, and check that {self._where} can be reached from it"
        )

    def _admit(self, connection: socket.socket) -> None:
        """Let a rank join that knows the secret."""
        connection.settimeout(GREETING_S)
        with suppress(OSError, ValueError, RuntimeError, msgspec.MsgspecError), self._greetings.limited(connection):
            host = connection.getpeername()[0]
            if not authenticate(connection, self._secret, is_listener=True):
                _log.warning("%s has connected without the secret", host)
                self._refused.add(host)
                connection.close()
                return
            join = frames.read_as(connection, Join)
            if join is not None and self._place(connection, host, join):
                return
        connection.close()

    def _place(self, connection: socket.socket, host: str, join: Join) -> bool:
        number = join.node * self._ranks_per_node + join.index
        with self._lock:
            is_expected = 0 <= join.index < self._ranks_per_node and number in self._missing
            self._missing.discard(number)
        if not is_expected:
            message = f"node {join.node} is not missing: another has its number, or nnodes is too small"
            connection.sendall(frames.pack(CoreFailed(message=message, kind="ConfigError")))
            return False
        try:
            connection.sendall(frames.pack(Joined(number, self._ranks_per_node)))
        except OSError:
            self._missing.add(number)
            raise
        keep_alive(connection)
        self._joined.put(Rank(number, connection, host=host))
        return True


def connect(address: str, port: int, secret: bytes, join: Join, timeout_s: float) -> tuple[socket.socket, Joined]:
    """Join the ranks that gather at an address, waiting for their listener. Raises ConfigError or EngineDeadError."""
    deadline = time.monotonic() + timeout_s
    where = f"{address}:{port}"
    is_waiting = False
    while True:
        try:
            connection = socket.create_connection((address, port), timeout=GREETING_S)
            break
        except UnicodeError as error:
            raise ConfigError(f"master_addr is {address}, which is no name of a machine: {error}") from error
        except OSError as error:
            if time.monotonic() > deadline:
                raise EngineDeadError(
                    f"the first machine has not been at {where} for {timeout_s:g} s: {error}; start `octavo serve` "
                    "there with the same master_addr and master_port"
                ) from error
            if not is_waiting:
                _log.info("waiting for the first machine at %s, for at most %g s", where, timeout_s)
                is_waiting = True
            time.sleep(_RETRY_S)
    try:
        return connection, introduce(connection, secret, join, Joined, where)
    except OSError as error:
        connection.close()
        raise EngineDeadError(
            f"{where} has closed the connection: {error}; check that it is an octavo with the same cluster_secret_file"
        ) from error
    except BaseException:
        connection.close()
        raise
