"""Sends blocks of this rank to ranks of other engines, layer by layer while a step computes them."""

from __future__ import annotations

import logging
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Final

import msgspec

from octavo.errors import PipeClosed, PipeError
from octavo.kv_transfer.messages import SendBlocks
from octavo.pipes.pipe import Listener, Pipe
from octavo.worker.transfer.block_io import BlockIO
from octavo.worker.transfer.pieces import (
    BlocksGone,
    Message,
    Piece,
    Subscribe,
    blocks_per_piece,
    bounds,
    decode,
    overlap,
)

_log = logging.getLogger(__name__)

_NUM_REMEMBERED: Final = 1024
"""Ended transfers that are remembered; subscriptions of unknown transfers wait until their connection ends."""


@dataclass(eq=False)
class _Offer:
    """Blocks of a transfer. Their layers below `end_layer` can be sent."""

    blocks: SendBlocks
    end_layer: int


class Sender:
    """Waits for subscriptions at a listener. A step notes available blocks; it never waits for a connection.

    Each connection has two threads: one sends, the other one notices the end of the connection.
    """

    def __init__(self, blocks: BlockIO, epoch: bytes, listener: Listener, on_ended: Callable[[bytes], None]) -> None:
        """on_ended: called from any thread with an ended transfer, once none of its blocks is being read."""
        self._blocks = blocks
        self._epoch = epoch
        self._listener = listener
        self._on_ended = on_ended
        self._changed = threading.Condition()
        """Guards the attributes below."""
        self._offers: dict[bytes, list[_Offer]] = {}
        self._num_readers = Counter[bytes]()
        self._ended: deque[bytes] = deque(maxlen=_NUM_REMEMBERED)
        self._fresh: list[_Offer] = []
        self._pipes: dict[Pipe, threading.Thread] = {}
        self._acceptor = threading.Thread(target=self._accept, name="octavo-kv-accept", daemon=True)
        self._acceptor.start()

    def offer(self, blocks: SendBlocks) -> None:
        """Note blocks that can be sent now or, if they are fresh, layer by layer during this step."""
        layers = self._blocks.layers
        offer = _Offer(blocks, layers.start if blocks.is_fresh else layers.stop)
        with self._changed:
            self._offers.setdefault(blocks.transfer, []).append(offer)
            if blocks.is_fresh:
                self._fresh.append(offer)
            self._changed.notify_all()

    def note_layer(self, *_: object) -> None:
        """Note that the step has computed its next layer."""
        with self._changed:
            for offer in self._fresh:
                offer.end_layer += 1
            self._changed.notify_all()

    def note_step(self) -> None:
        """Note that the step has ended, also where it was computed without `note_layer`."""
        with self._changed:
            for offer in self._fresh:
                offer.end_layer = self._blocks.layers.stop
            self._fresh.clear()
            self._changed.notify_all()

    def end(self, transfer: bytes) -> None:
        """Stop sending a transfer."""
        with self._changed:
            self._offers.pop(transfer, None)
            self._ended.append(transfer)
            is_read = transfer in self._num_readers
            self._changed.notify_all()
        if not is_read:
            self._on_ended(transfer)

    def close(self) -> None:
        """End all threads and connections."""
        self._listener.close()
        self._acceptor.join()
        with self._changed:
            pipes = dict(self._pipes)
        for pipe in pipes:
            pipe.close()
        for thread in pipes.values():
            thread.join()

    def _accept(self) -> None:
        with suppress(PipeClosed):  # the listener is closed
            while True:
                pipe = self._listener.accept()
                thread = threading.Thread(target=self._serve, args=(pipe,), name="octavo-kv-serve", daemon=True)
                with self._changed:
                    self._pipes[pipe] = thread
                    try:
                        thread.start()
                    except RuntimeError as error:  # there can be no more threads
                        _log.warning("a connection of a KV transfer is refused: %s", error)
                        del self._pipes[pipe]
                        pipe.close()

    def _serve(self, pipe: Pipe) -> None:
        """Send what the connection subscribes to until it ends."""
        sending = None
        try:
            with suppress(PipeClosed):  # the other rank has all that it needs, or has ended
                subscribe = self._checked(decode(pipe.recv_tensor()[1]))
                sending = threading.Thread(
                    target=self._send, args=(pipe, subscribe), name="octavo-kv-send", daemon=True
                )
                sending.start()
                pipe.recv_tensor()
                _log.warning("a connection of a KV transfer has subscribed twice")
        except Exception as error:
            _log.warning("a connection of a KV transfer has failed: %s: %s", type(error).__name__, error)
        finally:
            with self._changed:
                del self._pipes[pipe]
                self._changed.notify_all()
            pipe.close()
            if sending is not None and sending.ident is not None:  # it was started
                sending.join()

    def _checked(self, message: Message) -> Subscribe:
        """Return a subscription whose layers and heads this rank has. Raises PipeError."""
        own = self._blocks
        if not isinstance(message, Subscribe):
            raise PipeError("the first message is no subscription")
        layers = overlap(own.layers, message.layers)
        is_mine = bool(layers) and message.layers == bounds(layers)
        is_mine = is_mine and len(message.blocks) == len(message.heads) == own.num_groups
        for mine, wanted in zip(own.heads, message.heads, strict=True) if is_mine else ():
            is_mine = is_mine and (not range(*wanted) or wanted == bounds(overlap(mine, wanted)))
        if not is_mine:
            raise PipeError(f"layers {message.layers} and heads {message.heads} are not those of this rank")
        return message

    def _send(self, pipe: Pipe, subscribe: Subscribe) -> None:
        """Send each block of a subscription once, in the order of offers and, within an offer, of layers."""
        blocks, layers, heads = self._blocks, range(*subscribe.layers), [range(*each) for each in subscribe.heads]
        places = [place for place in blocks.places if place.layer in layers and heads[place.group]]
        missing = {group: set(subscribe.blocks[group]) for group in {place.group for place in places}}
        num_offers = 0
        try:
            while any(missing.values()):
                offer = self._next_offer(pipe, subscribe.transfer, num_offers)
                num_offers += 1
                found = {group: _found(offer.blocks, group, numbers) for group, numbers in missing.items()}
                for place in places:
                    block_ids, wanted = found[place.group], heads[place.group]
                    for numbers in _batched(block_ids, blocks_per_piece(blocks, place, wanted)):
                        with self._reading(pipe, offer, place.layer):
                            content = blocks.read(place, [block_ids[number] for number in numbers], wanted)
                        piece = Piece(subscribe.transfer, *place, bounds(wanted), numbers, self._epoch)
                        pipe.send_tensor(content, msgspec.msgpack.encode(piece.signed(content)))
                missing = {group: numbers - found[group].keys() for group, numbers in missing.items()}
        except PipeClosed:
            return  # as in `_serve`
        except Exception as error:
            _log.info("KV blocks are not sent: %s", error)
            with suppress(PipeError):  # then the other rank notices the end of the connection
                pipe.send_tensor(None, msgspec.msgpack.encode(BlocksGone(str(error))))
            pipe.close()

    def _next_offer(self, pipe: Pipe, transfer: bytes, index: int) -> _Offer:
        """Wait for an offer of a transfer. Raises PipeError."""
        with self._changed:
            self._wait(pipe, transfer, lambda: len(self._offers.get(transfer, ())) > index)
            return self._offers[transfer][index]

    @contextmanager
    def _reading(self, pipe: Pipe, offer: _Offer, layer: int) -> Iterator[None]:
        """Wait until a layer of an offer can be sent, and mark it as being read within the `with`. Raises PipeError."""
        transfer = offer.blocks.transfer
        with self._changed:
            self._wait(pipe, transfer, lambda: offer.end_layer > layer)
            self._num_readers[transfer] += 1
        try:
            yield
        finally:
            with self._changed:
                self._num_readers[transfer] -= 1
                is_last = not self._num_readers[transfer]
                if is_last:
                    del self._num_readers[transfer]
                has_ended = is_last and transfer not in self._offers
            if has_ended:
                self._on_ended(transfer)

    def _wait(self, pipe: Pipe, transfer: bytes, is_there: Callable[[], bool]) -> None:
        """Wait, holding the lock. Raises PipeClosed at the end of the connection, PipeError at that of the transfer."""
        while True:
            if pipe not in self._pipes:
                raise PipeClosed("the connection has ended")
            if transfer not in self._offers and transfer in self._ended:
                raise PipeError("the transfer has ended")
            if is_there():
                return
            self._changed.wait()


def _found(offered: SendBlocks, group: int, numbers: Iterable[int]) -> dict[int, int]:
    """Return the offered blocks with these numbers. Raises PipeError for one that is not held."""
    block_ids = offered.block_ids[group]
    found = {
        number: block_ids[number - offered.first]
        for number in sorted(numbers)
        if 0 <= number - offered.first < len(block_ids)
    }
    if not all(found.values()):
        raise PipeError("a block is not held, since its layers have not kept it")
    return found


def _batched(numbers: Iterable[int], size: int) -> Iterator[list[int]]:
    rest = list(numbers)
    while rest:
        yield rest[:size]
        rest = rest[size:]
