"""Carries out the commands of KV transfers that come with steps, beside the steps."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cached_property
from secrets import token_hex
from time import perf_counter
from typing import TYPE_CHECKING

import msgspec
from torch import nn

from octavo.core.process import frames
from octavo.kv_transfer.messages import (
    FetchBlocks,
    Fetched,
    LoadBlocks,
    PeerRank,
    RankCommands,
    RankNotes,
    SaveBlocks,
    SendBlocks,
)
from octavo.pipes.pipe import Listener
from octavo.worker.transfer.block_io import BlockIO
from octavo.worker.transfer.pieces import bounds
from octavo.worker.transfer.receiving import RankFetch
from octavo.worker.transfer.sending import Sender

if TYPE_CHECKING:
    from octavo.worker.transfer.file_tier import FileTiers

_log = logging.getLogger(__name__)


class RankTransfer:
    """The rank's half of a connector. Steps call it in one thread; blocks move in others.

    A failure ends its transfer with an error in the note, and never a step.
    """

    def __init__(
        self,
        blocks: BlockIO,
        layers: Iterable[nn.Module],
        notify: Callable[[bytes], None],
        open_tiers: Callable[[], FileTiers],
    ) -> None:
        """layers: those of the model on this rank, in their order, whose blocks are sent when they return; none where
        steps are launched beside the host, and send at their end. notify: sends `RankNotes`, from any thread.
        open_tiers: called when they are needed.
        """
        self._blocks = blocks
        self._layers = list(layers)
        self._notify = notify
        self._open_tiers = open_tiers
        self._sender: Sender | None = None
        self._secret: bytes | None = None
        self._lock = threading.Lock()
        """Guards the attributes below."""
        self._fetches: set[RankFetch] = set()
        self._ending: set[bytes] = set()
        """Transfers to forget once their fetches have ended."""

    def open(self, host: str, secret: bytes, epoch: bytes) -> PeerRank | None:
        """Prepare to fetch from ranks that know the secret, and, unless `host` is empty, to send blocks from there.

        host: an address, or a directory for a Unix socket. Returns the address and share of this rank, for other
        engines. Raises ConfigError for an address that cannot be used.
        """
        self._secret = secret
        if not host:
            return None
        if host.startswith("/"):
            host = f"{host}/kv-{token_hex(8)}"
            listener, port = Listener(f"shm://{host}", secret), 0
        else:
            listener = Listener(f"tcp://[{host}]:0" if ":" in host else f"tcp://{host}:0", secret)
            port = int(listener.address.rpartition(":")[2])
        self._sender = Sender(self._blocks, epoch, listener, lambda transfer: self._send(RankNotes(ended=[transfer])))
        return PeerRank(host, port, bounds(self._blocks.layers), [bounds(each) for each in self._blocks.heads])

    @contextmanager
    def step(self, payload: bytes) -> Iterator[None]:
        """Carry out these `RankCommands` around the step, which is computed within the `with`."""
        commands = msgspec.msgpack.decode(payload, type=RankCommands)
        for transfer in commands.ends:
            self._end(transfer)
        for load in commands.loads:
            self._loading.submit(self._load, load)
        for fetch in commands.fetches:
            self._fetch(fetch)
        with self._sending(commands.sends):
            yield
        if commands.drops:
            self._saving.submit(self._drop, commands.drops)
        for save in commands.saves:
            self._saving.submit(self._save, save)

    def close(self) -> None:
        """End all threads and connections, after the few waiting blocks are saved."""
        if self._sender is not None:
            self._sender.close()
        with self._lock:
            fetches = list(self._fetches)
        for fetch in fetches:
            fetch.cancel("the engine ends")
            fetch.thread.join()
        made = vars(self)
        if "_loading" in made:
            self._loading.shutdown(cancel_futures=True)
        if "_saving" in made:
            self._saving.shutdown()
        if "tiers" in made:
            self.tiers.close()

    @contextmanager
    def _sending(self, sends: Sequence[SendBlocks]) -> Iterator[None]:
        """Offer blocks, and the fresh ones among them after each layer.

        The hooks of the layers are there in such steps only. A step that is repeated from recorded calls, which have no
        hooks, sends at its end.
        """
        sender = self._sender
        if sender is None or not sends:
            yield
            return
        for blocks in sends:
            sender.offer(blocks)
        is_fresh = any(blocks.is_fresh for blocks in sends)
        hooks = [layer.register_forward_hook(sender.note_layer) for layer in self._layers if is_fresh]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
        sender.note_step()

    def _fetch(self, command: FetchBlocks) -> None:
        if self._secret is None:
            self._send(RankNotes(fetched=[Fetched(command.fetch_id, "this rank has no secret to connect with")]))
            return
        try:
            with self._lock:
                self._fetches.add(RankFetch(command, self._blocks, self._secret, self._end_fetch))
        except RuntimeError as error:  # there can be no more threads
            self._send(RankNotes(fetched=[Fetched(command.fetch_id, str(error))]))

    def _end_fetch(self, fetch: RankFetch, fetched: Fetched) -> None:
        with self._lock:
            self._fetches.discard(fetch)
            transfer = fetch.command.transfer
            has_ended = transfer in self._ending and not any(
                each.command.transfer == transfer for each in self._fetches
            )
            if has_ended:
                self._ending.remove(transfer)
        self._send(RankNotes(fetched=[fetched], ended=[transfer] if has_ended else []))

    def _end(self, transfer: bytes) -> None:
        """Forget a transfer. The note is sent once no thread reads or writes its blocks."""
        with self._lock:
            fetches = [fetch for fetch in self._fetches if fetch.command.transfer == transfer]
            if fetches:
                self._ending.add(transfer)
        for fetch in fetches:
            fetch.cancel("the transfer has ended")
        if fetches:
            return
        if self._sender is None:
            self._send(RankNotes(ended=[transfer]))
        else:
            self._sender.end(transfer)

    @cached_property
    def tiers(self) -> FileTiers:
        """The tiers outside the cache, opened on first use. Raises ConfigError."""
        return self._open_tiers()

    @cached_property
    def _loading(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(1, "octavo-kv-load")

    @cached_property
    def _saving(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(1, "octavo-kv-save")

    def _load(self, command: LoadBlocks) -> None:
        began, num_bytes, error = perf_counter(), 0, ""
        try:
            num_bytes = self.tiers.load(command)
        except Exception as failure:
            error = f"{type(failure).__name__}: {failure}"
        fetched = Fetched(command.fetch_id, error, num_bytes, perf_counter() - began)
        self._send(RankNotes(fetched=[fetched]))

    def _save(self, command: SaveBlocks) -> None:
        try:
            self.tiers.save(command)
        except Exception:
            _log.exception("%d blocks were not saved", len(command.digests))
        self._send(RankNotes(saved=[command.save_id]))

    def _drop(self, digests: list[bytes]) -> None:
        try:
            self.tiers.drop(digests)
        except Exception:
            _log.exception("%d blocks that are wrong were not removed", len(digests))

    def _send(self, notes: RankNotes) -> None:
        self._notify(frames.encode(notes))
