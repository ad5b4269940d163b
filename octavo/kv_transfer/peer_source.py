"""The fetching side of KV transfers: after any failure there, the prompt is computed here."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import Queue
from typing import Final

import msgspec

from octavo.core.messages import EngineCoreRequest
from octavo.core.process.listening import in_time
from octavo.errors import OctavoError
from octavo.kv_transfer.connector import Fetch
from octavo.kv_transfer.messages import (
    FetchBlocks,
    Fetched,
    PeerHello,
    PeerMessage,
    RankCommands,
    TransferAwaited,
    TransferDone,
    TransferGone,
    TransferRefused,
    Want,
)
from octavo.kv_transfer.peer_link import PeerLink, greet, open_socket
from octavo.kv_transfer.peer_server import MOST_EVENTS, NAME_BYTES
from octavo.kv_transfer.sources import PrefixSource

CONNECT_S: Final = 5.0
"""Seconds that connecting to another engine may take; requests that want its blocks wait for it."""
_PATIENCE: Final = 4
"""Number of leases for which an engine that sends heartbeats may send nothing of a transfer, which may wait for others
there."""
_FIRST_RETRY_S: Final = 0.5
_LAST_RETRY_S: Final = 30.0

_log = logging.getLogger(__name__)


@dataclass(eq=False)
class _Engine:
    """Another engine. retry_at: time before which no connection is tried. retry_s: wait after the next failure.
    reported: the last reason that was logged."""

    address: str
    link: PeerLink | None = None
    hello: PeerHello | None = None
    is_connecting: bool = False
    retry_s: float = _FIRST_RETRY_S
    retry_at: float = 0.0
    reported: str = ""

    def send(self, message: PeerMessage) -> None:
        """Send a message if there is a connection."""
        if self.link is not None:
            self.link.send(message)


@dataclass(eq=False)
class _Transfer:
    """The transfer of a request. is_sent: its fetch was sent to the ranks. error: reason of its failure; empty if it
    has not failed."""

    name: bytes
    engine: _Engine
    request_id: str
    digests: list[bytes]
    fetch: Fetch | None = None
    is_sent: bool = False
    error: str = ""


_Event = tuple[PeerLink, PeerMessage | PeerHello | None] | str
"""An event of a connection: its PeerHello when it is made, a message, or its end (None). A text is the reason of a
failed connection."""


class PeerSource(PrefixSource):
    """Keeps one connection to each engine from which a request fetches; a thread opens it when it is needed."""

    def __init__(self, secret: bytes, hello: PeerHello, lease_s: float, wake: Callable[[], None]) -> None:
        """lease_s: seconds for which an engine may send nothing."""
        self._secret = secret
        self._hello = hello
        self._lease_s = lease_s
        self._wake = wake
        self._events = Queue[tuple[_Engine, _Event]](MOST_EVENTS)
        self._engines: dict[str, _Engine] = {}
        self._transfers: dict[str, _Transfer] = {}
        self._fetches: dict[int, _Transfer] = {}
        self._failed: list[tuple[int, str]] = []
        self._commands = RankCommands()
        self._is_closed = False

    # ---- connections ----

    def _connect(self, engine: _Engine) -> None:
        """Make a connection, in a thread of its own."""
        try:
            connection = open_socket(engine.address, CONNECT_S)
            try:
                with in_time(connection):
                    hello = greet(connection, self._secret, self._hello, is_listener=False)
            except BaseException:
                connection.close()
                raise
        except (OSError, ValueError, msgspec.MsgspecError, OctavoError) as error:
            self._receive(engine, str(error))
            return
        if self._is_closed:
            connection.close()
            return
        link = PeerLink(connection, self._lease_s)
        self._receive(engine, (link, hello))
        link.start(lambda link, message: self._receive(engine, (link, message)))

    def _receive(self, engine: _Engine, event: _Event) -> None:
        self._events.put((engine, event))
        self._wake()

    def poll(self) -> list[tuple[int, str]]:
        for _ in range(self._events.qsize()):
            self._process(*self._events.get())
        failed, self._failed = self._failed, []
        return failed

    def _process(self, engine: _Engine, event: _Event) -> None:
        if isinstance(event, str):
            engine.is_connecting = False
            self._lose(engine, event)
            return
        link, message = event
        if isinstance(message, PeerHello) and engine.link is None:
            engine.is_connecting, engine.retry_s = False, _FIRST_RETRY_S
            engine.link, engine.hello = link, _reachable(message, engine.address)
            for transfer in self._of(engine):
                self._want(transfer)
        elif engine.link is not link:
            return  # an earlier connection
        elif message is None:
            self._lose(engine, "the connection has ended")
        elif isinstance(message, TransferRefused | TransferGone):
            because = message.reason if isinstance(message, TransferRefused) else "the blocks are no longer held"
            for transfer in self._of(engine):
                if transfer.name == message.transfer:
                    self._fail(transfer, because)
                    self._report(engine, because)

    def _lose(self, engine: _Engine, because: str) -> None:
        """Fail the transfers of an engine, and wait before the next attempt to connect."""
        engine.link = engine.hello = None
        engine.retry_at = time.monotonic() + engine.retry_s
        engine.retry_s = min(_LAST_RETRY_S, 2 * engine.retry_s)
        for transfer in self._of(engine):
            self._fail(transfer, because)
        self._report(engine, because)

    def _report(self, engine: _Engine, because: str) -> None:
        if because != engine.reported:
            _log.warning("prompts are computed here instead of fetched from %s: %s", engine.address, because)
        engine.reported = because

    def _of(self, engine: _Engine) -> list[_Transfer]:
        every = dict.fromkeys([*self._transfers.values(), *self._fetches.values()])  # in the order of the requests
        return [each for each in every if each.engine is engine and not each.error]

    # ---- requests ----

    def added(self, request: EngineCoreRequest, digests: Sequence[bytes]) -> None:
        if request.prefill is None or not digests:
            return
        engine = self._engines.setdefault(request.prefill, _Engine(request.prefill))
        if engine.link is None and not engine.is_connecting:
            if time.monotonic() < engine.retry_at:
                return
            try:
                threading.Thread(target=self._connect, args=[engine], name="octavo-kv-connect", daemon=True).start()
            except RuntimeError as error:  # there can be no more threads
                self._lose(engine, str(error))
                return
            engine.is_connecting = True
        transfer = _Transfer(os.urandom(NAME_BYTES), engine, request.request_id, list(digests))
        self._transfers[request.request_id] = transfer
        if engine.link is not None:
            self._want(transfer)

    def _want(self, transfer: _Transfer) -> None:
        transfer.engine.send(Want(transfer.name, transfer.digests))
        self._send(transfer)

    def find(self, request: EngineCoreRequest, digests: Sequence[bytes]) -> int:
        transfer = self._transfers.get(request.request_id)
        if transfer is None or transfer.error or not digests or digests[0] not in transfer.digests:
            return 0
        first = transfer.digests.index(digests[0])
        pairs = zip(digests, transfer.digests[first:], strict=False)
        return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(digests), len(transfer.digests) - first))

    def fetch(self, fetch: Fetch) -> None:
        transfer = self._transfers.get(fetch.request_id)
        if transfer is None or transfer.error:
            self._failed.append((fetch.fetch_id, "the request has ended" if transfer is None else transfer.error))
            self._wake()
            return
        transfer.fetch = fetch
        self._fetches[fetch.fetch_id] = transfer
        self._send(transfer)

    def _send(self, transfer: _Transfer) -> None:
        """Let the ranks begin a fetch whose engine is connected."""
        fetch, hello = transfer.fetch, transfer.engine.hello
        if fetch is not None and hello is not None:
            transfer.is_sent = True
            first = transfer.digests.index(fetch.digests[0])
            place, patience_s = (fetch.fetch_id, transfer.name, first, fetch.block_ids), _PATIENCE * self._lease_s
            self._commands.fetches.append(FetchBlocks(*place, hello.ranks, hello.epoch, patience_s))
            transfer.engine.send(TransferAwaited(transfer.name))

    def commands(self, *, has_work: bool) -> RankCommands:
        commands, self._commands = self._commands, RankCommands()
        return commands

    def _fail(self, transfer: _Transfer, because: str) -> None:
        """Fail a transfer. Its request is computed once no rank writes into its blocks any more."""
        transfer.error = because
        if transfer.is_sent:
            self._commands.ends.append(transfer.name)
            self._wake()
        elif transfer.fetch is not None:
            del self._fetches[transfer.fetch.fetch_id]
            self._failed.append((transfer.fetch.fetch_id, because))
            self._wake()

    def end_fetches(self) -> None:
        for transfer in [each for each in self._fetches.values() if not each.error]:
            self._fail(transfer, "a pause forgets what is cached")

    def fetched(self, note: Fetched) -> str:
        transfer, error = self._fetches.pop(note.fetch_id), note.error
        self._transfers.pop(transfer.request_id, None)
        transfer.engine.send(TransferDone(transfer.name))
        if not error:
            transfer.engine.reported = ""
        elif not transfer.error:
            self._report(transfer.engine, error)
        return error and (transfer.error or error)

    def ended(self, request_id: str) -> None:
        transfer = self._transfers.pop(request_id, None)
        if transfer is None:
            return
        if not transfer.error:
            self._fail(transfer, "the request has ended")
        if not transfer.is_sent:
            transfer.engine.send(TransferDone(transfer.name))

    def passed(self, request_id: str) -> None:
        self.ended(request_id)

    def close(self) -> None:
        """End all connections. Idempotent."""
        self._is_closed = True
        self.poll()  # a connection may have been made meanwhile
        for engine in self._engines.values():
            if engine.link is not None:
                engine.link.close()


def _reachable(hello: PeerHello, address: str) -> PeerHello:
    """Return a PeerHello in which ranks that listen on all addresses (wildcard) get the host of this address."""
    host = address.rpartition(":")[0].strip("[]")
    ranks = [
        msgspec.structs.replace(each, host=host) if each.host in ("0.0.0.0", "::") else each for each in hello.ranks
    ]
    return msgspec.structs.replace(hello, ranks=ranks)
