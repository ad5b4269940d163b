"""An engine core that fronts on other machines reach over TCP, one front at a time; and a front's way to it.

After the proof of the secret (`core/process/authentication`) either end sends a `LinkHello`. The frames of a core in a
process of its front follow. The core outlives its fronts: when one goes, its requests end.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import struct
import threading
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Final

import msgspec

from octavo.core.messages import CoreFailed, FromCore, Shutdown
from octavo.core.process import frames
from octavo.core.process.authentication import GREETING_S, authenticate, introduce, keep_alive
from octavo.core.process.listening import Greetings, cut, in_time
from octavo.core.process.processes import report_failure
from octavo.engine.cores.core_client import ProcessClient
from octavo.engine.cores.core_process import CoreServer, Inbox
from octavo.errors import ConfigError, EngineDeadError

if TYPE_CHECKING:
    from octavo.engine.engine_core import EngineCore

PROTOCOL: Final = 1
"""The version of the messages between a front and a core on different machines."""

SEND_S: Final = 10.0
"""How long a front may read nothing while the core has something to send; then its connection is closed."""

READY_S: Final = 60.0
"""How long a core that has admitted a front may take to begin with it: it may be in a step of the front before."""

_log = logging.getLogger(__name__)


class LinkHello(msgspec.Struct, frozen=True, kw_only=True, tag="hello"):
    """What one end of a link runs. Every version can read the first two fields of every other version's message.

    octavo: its version. model: its name; config: a digest of its config.json. build: of a core, what else decides its
    bits; role: its role.
    """

    protocol: int = PROTOCOL
    octavo: str
    model: str = ""
    config: str = ""
    build: dict[str, str] = {}
    role: str | None = None

    def difference(self, other: LinkHello, here: str, there: str) -> str | None:
        """Return the first difference between both ends, with both values and the remedy; None when they fit."""
        for name in ("protocol", "octavo"):
            ours, theirs = getattr(self, name), getattr(other, name)
            if ours != theirs:
                return f"{name} is {ours} at {here} and {theirs} at {there}; install the same version on both"
        if self.config != other.config:
            return (
                f"the model is {self.model} (config.json {self.config}) at {here} and {other.model} "
                f"({other.config}) at {there}; give both the same model"
            )
        return None


class CoreLink:
    """The fronts of a core: one has it at a time, and others are refused.

    `begin` and `end` run between the steps of the core, `send` and `report` in any thread.
    """

    def __init__(self, secret: bytes, hello: LinkHello) -> None:
        self._secret = secret
        self._hello = hello
        self._greetings = Greetings()
        self._inbox: Inbox | None = None
        self._listener: socket.socket
        self._lock = threading.Lock()
        self._connection: socket.socket | None = None
        self._front: str | None = None
        """The front that has the core, from its admission until its requests have ended."""

    def serve(
        self, core: EngineCore, inbox: Inbox, listener: socket.socket, build: dict[str, str] | None = None
    ) -> None:
        """Serve the fronts that come to a listener until `stop`. Raises what the core raises.

        build: what decides the bits of the core's results.
        """
        if build is not None:
            self._hello = msgspec.structs.replace(self._hello, build=build)
        server = CoreServer(core, self.send, inbox)
        core.announce = self.send
        self._inbox, self._listener = inbox, listener
        self._greetings.begin(listener, partial(self._serve_front, server, core), "octavo-front")
        server.run()

    def stop(self, *_: object) -> None:
        """End `serve` after the step in progress, or the process before `serve`: a handler of signals."""
        if self._inbox is None:
            os._exit(0)
        self._inbox.put(self._end_on_request)

    def _end_on_request(self) -> None:
        assert self._inbox is not None, "the core is served"
        self._listener.shutdown(socket.SHUT_RDWR)  # a front that connects again finds the next engine here
        self.report(CoreFailed(message="the engine was ended by a signal", is_on_request=True))
        self._inbox.put(Shutdown())

    def send(self, message: FromCore) -> None:
        """Send a message to the front, if there is one. One that does not read for `SEND_S` is disconnected."""
        with self._lock:
            connection = self._connection
            if connection is None:
                return
            try:
                connection.sendall(frames.pack(message))
            except OSError as error:
                if isinstance(error, BlockingIOError):
                    _log.warning("front %s has read nothing for %g s: its connection is closed", self._front, SEND_S)
                self._connection = None
                cut(connection)  # this ends the reading thread

    def report(self, failure: CoreFailed) -> None:
        """Send the front why the core ends, as its last message, or log it when there is no front."""
        with self._lock:  # the thread that reads does not close the connection meanwhile
            if self._connection is not None:
                report_failure(self._connection, failure)
            elif not failure.is_on_request:
                _log.error("%s", failure.message)

    def _serve_front(self, server: CoreServer, core: EngineCore, connection: socket.socket) -> None:
        where = "a connection that has ended"
        with connection:
            try:
                where = str(CoreAddress(*connection.getpeername()[:2]))
                with self._greetings.limited(connection):
                    is_admitted = self._admit(connection, where)
            except (OSError, ValueError, RuntimeError, msgspec.MsgspecError) as error:
                _log.warning("%s has connected and is no front: %s", where, error)
                return
            if is_admitted:
                self._read(server, core, connection)

    def _read(self, server: CoreServer, core: EngineCore, connection: socket.socket) -> None:
        """Let the core process the messages of a front that has it."""
        assert self._inbox is not None, "the core is served"
        self._inbox.put(partial(self.begin, core, connection))
        try:
            server.read_messages(connection)
        except (ValueError, msgspec.MsgspecError) as error:
            _log.error("front %s has sent data that is no message: %s", self._front, error)
        with self._lock:
            self._connection = None
        self._inbox.put(partial(self.end, core))

    def _admit(self, connection: socket.socket, where: str) -> bool:
        """Return whether the front at the other end of a connection has the core from now on."""
        connection.settimeout(GREETING_S)
        if not authenticate(connection, self._secret, is_listener=True):
            _log.warning("%s has connected without the secret", where)
            return False
        hello = frames.read_as(connection, LinkHello)
        if hello is None:
            return False
        refusal = self._refusal(hello, where)
        if refusal is not None:
            _log.warning("front %s is refused: %s", where, refusal.message)
            connection.sendall(frames.pack(refusal))
            return False
        try:
            connection.sendall(frames.pack(self._hello))
            keep_alive(connection)
            connection.settimeout(None)
            send_timeout = struct.pack("ll", int(SEND_S), int(SEND_S % 1 * 1e6))
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, send_timeout)
        except OSError:
            self._front = None
            raise
        return True

    def _refusal(self, front: LinkHello, where: str) -> CoreFailed | None:
        """Return why a front cannot have the core. None: it has it from now on."""
        difference = self._hello.difference(front, "the engine", "the front")
        if difference is not None:
            return CoreFailed(message=difference, kind="ConfigError")
        with self._lock:
            if self._front is not None:
                return CoreFailed(message=f"the front at {self._front} has this engine, which serves one at a time")
            self._front = where
        return None

    def begin(self, core: EngineCore, connection: socket.socket) -> None:
        """Let a front have the core."""
        _log.info("front %s has connected", self._front)
        with self._lock:
            self._connection = connection
        self.send(core.ready)

    def end(self, core: EngineCore) -> None:
        """End the requests of a front that has gone."""
        num_requests = core.drop_requests()
        _log.info("front %s has disconnected; its %d open requests are ended", self._front, num_requests)
        with self._lock:
            self._connection = self._front = None


class CoreAddress(msgspec.Struct, frozen=True):
    """Where a core listens."""

    host: str
    port: int

    @classmethod
    def read(cls, text: str) -> CoreAddress:
        """Return the address that `host:port` means; an IPv6 host is in brackets. Raises ConfigError."""
        host, _, port = text.rpartition(":")
        try:
            is_name = bool(host.encode("idna")) and "/" not in host
        except UnicodeError:  # two dots in a row, or a label that is too long
            is_name = False
        if not is_name or not port.isdecimal() or not 0 < int(port) < 1 << 16:
            raise ConfigError(f"{text!r} is not the address of an engine; give host:port, such as 10.0.0.2:9000")
        return cls(host.removeprefix("[").removesuffix("]"), int(port))

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


async def connect(address: CoreAddress, secret: bytes, front: LinkHello) -> tuple[ProcessClient, LinkHello]:
    """Return the client of the core at an address, and what the core is.

    Raises EngineDeadError when there is none or another front has it, ConfigError when they do not fit.
    """
    name = f"the engine at {address}"
    try:
        connection, core = await asyncio.to_thread(_greet, address, secret, front)
    except (OSError, msgspec.MsgspecError) as error:
        raise EngineDeadError(f"{name} has ended the connection: {error}") from error
    try:
        async with asyncio.timeout(READY_S):
            return await ProcessClient.connect(connection, name=name), core
    except TimeoutError:
        raise EngineDeadError(f"{name} has not been ready for its front within {READY_S:g} s") from None
    except msgspec.MsgspecError as error:
        raise EngineDeadError(f"{name} has sent data that is no message: {error}") from error


def _greet(address: CoreAddress, secret: bytes, front: LinkHello) -> tuple[socket.socket, LinkHello]:
    try:
        connection = socket.create_connection((address.host, address.port), timeout=GREETING_S)
    except OSError as error:
        raise EngineDeadError(
            f"no engine is at {address}: {error}; start `octavo serve --role decode` (or prefill) there"
        ) from error
    with ExitStack() as on_failure:
        on_failure.enter_context(connection)
        with in_time(connection):
            reply = introduce(connection, secret, front, LinkHello, f"the engine at {address}")
        if (difference := front.difference(reply, "the front", str(address))) is not None:
            raise ConfigError(difference)
        on_failure.pop_all()
    return connection, reply
