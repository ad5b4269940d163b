"""Fetches blocks from ranks of other engines and writes verified pieces."""

from __future__ import annotations

import threading
from collections.abc import Callable
from time import perf_counter
from typing import Final

import msgspec
from torch import Tensor, uint8

from octavo.errors import PipeError
from octavo.kv_transfer.messages import FetchBlocks, Fetched, PeerRank
from octavo.pipes.pipe import Pipe, connect
from octavo.worker.transfer.block_io import BlockIO, Place
from octavo.worker.transfer.pieces import BlocksGone, PeerPart, Piece, Subscribe, bounds, decode, divide

_DEADLINE_S: Final = 10.0
"""Seconds that connecting may take, and each message once it has begun."""


def connect_to(peer: PeerRank, secret: bytes) -> Pipe:
    """Connect to a rank of another engine, which knows the same secret."""
    host = f"[{peer.host}]" if ":" in peer.host else peer.host
    address = f"shm://{host}" if host.startswith("/") else f"tcp://{host}:{peer.port}"
    return connect(address, secret, _DEADLINE_S)


class RankFetch:
    """Receives the blocks of one command, in a thread for each rank of the other engine that has some of them.

    A piece is written only if it is missing and its content has the checksum of the other rank.
    """

    def __init__(
        self, command: FetchBlocks, blocks: BlockIO, secret: bytes, on_end: Callable[[RankFetch, Fetched], None]
    ) -> None:
        """on_end: called from a thread of the fetch when no thread writes any more."""
        self.command = command
        self._blocks = blocks
        self._secret = secret
        self._on_end = on_end
        self._targets = [
            {number: block for number, block in enumerate(block_ids, start=command.first) if block}
            for block_ids in command.block_ids
        ]
        """For each cache group: the destination of each block of the transfer."""
        self._lock = threading.Lock()
        self._pipes: list[Pipe] = []
        self._error = ""
        self._num_bytes = 0
        self.thread = threading.Thread(target=self._run, name="octavo-kv-fetch", daemon=True)
        self.thread.start()

    def cancel(self, reason: str) -> None:
        """End the fetch with an error, unless it has ended."""
        with self._lock:
            self._error = self._error or reason
            pipes = list(self._pipes)
        for pipe in pipes:
            pipe.close()

    def _run(self) -> None:
        began = perf_counter()
        threads: list[threading.Thread] = []
        try:
            for part in divide(self.command.peers, self._blocks):
                thread = threading.Thread(target=self._receive, args=(part,), name="octavo-kv-receive", daemon=True)
                thread.start()
                threads.append(thread)
        except Exception as error:
            self.cancel(f"{type(error).__name__}: {error}")
        for thread in threads:
            thread.join()
        fetched = Fetched(self.command.fetch_id, self._error, self._num_bytes, perf_counter() - began)
        self._on_end(self, fetched)

    def _receive(self, part: PeerPart) -> None:
        """Receive the part of one rank. Any exception ends the fetch."""
        peer, layers, heads = part
        places = (place for place in self._blocks.places if place.layer in layers and heads[place.group])
        missing = {place: dict(self._targets[place.group]) for place in places if self._targets[place.group]}
        try:
            if not missing:
                return
            pipe = connect_to(peer, self._secret)
            try:
                with self._lock:
                    self._pipes.append(pipe)
                    if self._error:
                        return
                numbers = [list(blocks) for blocks in self._targets]
                wanted = [bounds(each) for each in heads]
                subscribe = Subscribe(self.command.transfer, bounds(layers), wanted, numbers)
                pipe.send_tensor(None, msgspec.msgpack.encode(subscribe))
                while missing:
                    content, header = pipe.recv_tensor(self.command.patience_s)
                    piece, content = self._verified(header, content, heads, missing)
                    place = Place(piece.layer, piece.group)
                    block_ids = [missing[place].pop(number) for number in piece.blocks]
                    self._blocks.write(place, block_ids, heads[place.group], content)
                    if not missing[place]:
                        del missing[place]
                    with self._lock:
                        self._num_bytes += content.nbytes
            finally:
                pipe.close()
        except Exception as error:
            where = peer.host if peer.host.startswith("/") else f"{peer.host}:{peer.port}"
            self.cancel(f"{where}: {type(error).__name__}: {error}")

    def _verified(
        self, header: bytes, content: Tensor | None, heads: list[range], missing: dict[Place, dict[int, int]]
    ) -> tuple[Piece, Tensor]:
        """Return a piece that may be written. Raises PipeError."""
        piece = decode(header)
        if isinstance(piece, BlocksGone):
            raise PipeError(piece.reason)
        if not isinstance(piece, Piece) or content is None:
            raise PipeError("a message is no piece of a transfer")
        place = Place(piece.layer, piece.group)
        numbers = missing.get(place, {})
        if piece.transfer != self.command.transfer or (numbers and piece.heads != bounds(heads[place.group])):
            raise PipeError(f"a piece of heads {piece.heads} is not of the subscription")
        if piece.epoch != self.command.epoch:
            raise PipeError("the other engine has started again since the handshake")
        if not piece.blocks or len(set(piece.blocks)) < len(piece.blocks) or not numbers.keys() >= set(piece.blocks):
            raise PipeError(f"blocks of layer {piece.layer} are not needed or came twice")
        shape = self._blocks.shape(place, len(piece.blocks), heads[place.group])
        if content.dtype is not uint8 or content.shape != shape:
            raise PipeError(f"a piece is {content.dtype} {tuple(content.shape)}, must be {uint8} {shape}")
        if piece.checksum != piece.checksum_of(content):
            raise PipeError(f"blocks of layer {piece.layer} are corrupted: their checksum is another")
        return piece, content
