"""The sending side of KV transfers: holds blocks that other engines request, and lets the ranks send them."""

from __future__ import annotations

import logging
import socket
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from queue import Queue
from typing import Final

import msgspec

from octavo.core.messages import EngineCoreRequest
from octavo.core.process.listening import Greetings
from octavo.errors import OctavoError
from octavo.kv_cache.block_manager import BlockManager
from octavo.kv_cache.block_pool import Content
from octavo.kv_cache.group_cache import fewest_blocks
from octavo.kv_transfer.host_folder import HostFolder
from octavo.kv_transfer.messages import (
    PeerHello,
    PeerMessage,
    RankCommands,
    SendBlocks,
    TransferAwaited,
    TransferDone,
    TransferGone,
    TransferRefused,
    Want,
)
from octavo.kv_transfer.peer_link import PeerLink, PeerRefused, greet
from octavo.kv_transfer.sources import PrefixSource

NAME_BYTES: Final = 16
"""Length of the name of a transfer."""
MOST_CONNECTIONS: Final = 64
"""Most engines that may be connected at once."""
MOST_TRANSFERS: Final = 256
"""Most transfers of one engine at once, waiting ones included."""
MOST_EVENTS: Final = 256
"""Most messages that are queued for the next step and processed before it; further ones are not read yet."""
SHARE: Final = 0.5
"""Share of the blocks of each cache group that transfers of all engines may hold at once. Transfers that are being
fetched may hold that share without counting the others."""

_log = logging.getLogger(__name__)


@dataclass(eq=False)
class _Transfer:
    """firsts: for each cache group the index of the first block that is needed. num_there: number of leading blocks
    held. is_fetched: the other engine's ranks wait for it."""

    name: bytes
    link: PeerLink
    digests: list[bytes]
    firsts: list[int]
    num_there: int = 0
    is_fetched: bool = False


class PeerServer(PrefixSource):
    """Listens for other engines; a `BlockListener` of the pools from which they read.

    Transfers wait, in order, while others hold the most allowed blocks. Those that are being fetched wait only for each
    other, because the other engine may end the others only after them. The blocks of a transfer are held until the
    other engine releases them, its lease expires, or no request could run otherwise; then until no rank reads them.
    """

    def __init__(
        self,
        listener: socket.socket,
        secret: bytes,
        hello: PeerHello,
        block_manager: BlockManager,
        lease_s: float,
        wake: Callable[[], None],
        folder: HostFolder | None = None,
    ) -> None:
        """lease_s: seconds after the last message of an engine at which its transfers end. folder: the folder of the
        socket, if this engine's server has made it."""
        self._folder = folder
        self._listener = listener
        self._secret = secret
        self._hello = hello
        self._blocks = block_manager
        self._lease_s = lease_s
        self._wake = wake
        self._greetings = Greetings()
        self._links: set[PeerLink] = set()
        self._events = Queue[tuple[PeerLink, PeerMessage | None]](MOST_EVENTS)
        self._waiting: deque[_Transfer] = deque()
        self._transfers: dict[bytes, _Transfer] = {}
        self._incomplete: dict[bytes, _Transfer] = {}
        self._ending: dict[bytes, int] = {}
        self._ends: list[bytes] = []
        self._fresh: set[bytes] = set()
        self._computing = Counter[bytes]()
        self._requests: dict[str, bytes] = {}
        self._most_blocks = int(SHARE * fewest_blocks(block_manager.groups))
        block_manager.listeners.append(self)
        self._greetings.begin(listener, self._greet, "octavo-kv-peer")

    # ---- threads of connections ----

    def _greet(self, connection: socket.socket) -> None:
        try:
            with self._greetings.limited(connection):
                greet(connection, self._secret, self._hello, is_listener=True)
            if len(self._links) >= MOST_CONNECTIONS:
                raise PeerRefused(f"{MOST_CONNECTIONS} engines are connected")
            link = PeerLink(connection, self._lease_s)
            self._links.add(link)
            if self._listener.fileno() < 0:  # `close` has not seen it
                link.close()
            link.start(self._receive)
        except (OSError, ValueError, RuntimeError, msgspec.MsgspecError, OctavoError) as error:
            _log.warning("an engine that wanted KV blocks is refused: %s", error)
            connection.close()

    def _receive(self, link: PeerLink, message: PeerMessage | None) -> None:
        if message is None:
            self._links.discard(link)
        self._events.put((link, message))
        self._wake()

    # ---- requests and blocks of this engine ----

    def added(self, request: EngineCoreRequest, digests: Sequence[bytes]) -> None:
        if request.keep_s and digests:
            self._requests[request.request_id] = digests[-1]
            self._computing[digests[-1]] += 1

    def ended(self, request_id: str) -> None:
        digest = self._requests.pop(request_id, None)
        if digest is not None:
            self._computing -= Counter([digest])
            if self._incomplete:
                self._wake()

    def stored(self, group: int, block: int, content: Content) -> None:
        """Note a block that the step being planned fills (`BlockListener`)."""
        if self._incomplete:
            self._fresh.add(content.digest)

    def removed(self, group: int, digest: bytes) -> None:
        """Do nothing: blocks that a transfer holds are not removed (`BlockListener`)."""

    # ---- transfers ----

    def poll(self) -> list[tuple[int, str]]:
        for _ in range(self._events.qsize()):
            link, message = self._events.get()
            match message:
                case Want(name, digests):
                    self._add(link, name, digests)
                case TransferAwaited(name):
                    for transfer in self._of(link):
                        transfer.is_fetched |= transfer.name == name
                case TransferDone(name):
                    for transfer in [each for each in self._of(link) if each.name == name]:
                        self._blocks.pins.end_keep(transfer.digests)
                        self._end(transfer)
                case None:
                    for transfer in self._of(link):
                        self._end(transfer)
        self._begin()
        return []

    def _of(self, link: PeerLink) -> list[_Transfer]:
        return [each for each in (*self._transfers.values(), *self._waiting) if each.link is link]

    def _add(self, link: PeerLink, name: bytes, digests: list[bytes]) -> None:
        others, used = self._of(link), {*self._transfers, *self._ending, *(each.name for each in self._waiting)}
        if len(name) != NAME_BYTES or name in used or not digests:
            link.send(TransferRefused(name, "the name of the transfer is wrong or in use, or it has no blocks"))
        elif len(others) >= MOST_TRANSFERS:
            because = f"there are {len(others)} transfers of this engine, at most {MOST_TRANSFERS} are allowed"
            link.send(TransferRefused(name, because))
        else:
            firsts = [cache.first_sent(len(digests)) for cache in self._blocks.groups]
            self._waiting.append(_Transfer(name, link, digests, firsts))

    def _begin(self) -> None:
        """Begin waiting transfers in order: first those being fetched, while these hold at most `_most_blocks`
        together, then any, while all do. A transfer that is larger by itself waits until there is no other."""
        for are_fetched in (True, False):
            others = [each for each in self._transfers.values() if each.is_fetched or not are_fetched]
            num_held = sum(len(each.digests) for each in others) + sum(self._ending.values())
            for transfer in [each for each in self._waiting if each.is_fetched or not are_fetched]:
                if num_held and num_held + len(transfer.digests) > self._most_blocks:
                    break
                self._waiting.remove(transfer)
                self._transfers[transfer.name] = self._incomplete[transfer.name] = transfer
                num_held += len(transfer.digests)

    def _end(self, transfer: _Transfer) -> None:
        """Let the ranks forget a transfer; its blocks are freed when they have done so."""
        if transfer in self._waiting:
            self._waiting.remove(transfer)
            return
        self._incomplete.pop(transfer.name, None)
        del self._transfers[transfer.name]
        self._ending[transfer.name] = len(transfer.digests)
        self._ends.append(transfer.name)

    def released(self, transfer: bytes) -> None:
        if self._ending.pop(transfer, None) is not None:
            self._blocks.holds.end(("transfer", transfer))

    def end_reads(self) -> None:
        for transfer in list(self._transfers.values()):
            transfer.link.send(TransferGone(transfer.name))
            self._end(transfer)
        if self._ends:
            self._wake()

    def commands(self, *, has_work: bool) -> RankCommands:
        sends: list[SendBlocks] = []
        for transfer in list(self._incomplete.values()):
            sends += self._sends(transfer, has_work=has_work)
            if transfer.num_there == len(transfer.digests):
                del self._incomplete[transfer.name]
            elif not self._computing[transfer.digests[-1]]:
                transfer.link.send(
                    TransferRefused(transfer.name, "the blocks are not cached, and no request computes them")
                )
                self._end(transfer)
        self._fresh.clear()
        ends, self._ends = self._ends, []
        return RankCommands(sends=sends, ends=ends)

    def _sends(self, transfer: _Transfer, *, has_work: bool) -> list[SendBlocks]:
        """Hold the blocks of a transfer that are in the pools by now, and return the send commands: one for blocks that
        the step computes, and one for the others."""
        sends: list[SendBlocks] = []
        while transfer.num_there < len(transfer.digests):
            place, digest = transfer.num_there, transfer.digests[transfer.num_there]
            is_needed = [place >= first for first in transfer.firsts]
            blocks = self._blocks.holds.hold_found(("transfer", transfer.name), digest, is_needed)
            if blocks is None:
                break
            is_fresh = has_work and digest in self._fresh
            if not sends or sends[-1].is_fresh is not is_fresh:
                sends.append(SendBlocks(transfer.name, place, [[] for _ in blocks], is_fresh))
            for ids, block in zip(sends[-1].block_ids, blocks, strict=True):
                ids.append(block)
            transfer.num_there += 1
        return sends

    def close(self) -> None:
        """Stop listening and end all connections. Idempotent."""
        if self in self._blocks.listeners:
            self._blocks.listeners.remove(self)
        with suppress(OSError):  # it is closed already
            if isinstance(path := self._listener.getsockname(), str):
                Path(path).unlink(missing_ok=True)
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._listener.close()
        for link in list(self._links):
            link.close()
        if self._folder is not None:
            self._folder.close()
