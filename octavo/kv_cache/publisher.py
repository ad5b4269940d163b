"""KV events over ZeroMQ, as vLLM publishes them: for routers that index which engine has which prefix.

A message has three frames: the topic, the number of the batch (8 bytes, big-endian), and MessagePack: an array of Unix
seconds, events and the number of the replica. An event is an object whose `type` is BlockStored, BlockRemoved or
AllBlocksCleared. A client that sends a number to the replay socket (REQ or DEALER) gets the kept batches from that
number on, each as its number and its MessagePack, and then the number -1.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from queue import Empty, Full, Queue
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec

from octavo.core.block_events import KvEventsConfig
from octavo.core.cache_key import PLAIN
from octavo.core.cache_limits import CacheLimits, GroupLimits
from octavo.errors import ConfigError
from octavo.kv_cache.block_hash import root_digest

if TYPE_CHECKING:
    from octavo.kv_cache.block_pool import Content

BATCH_S: Final = 0.005
"""Seconds for which events of a step are gathered for a batch."""
REJOIN_S: Final = 1.0
"""Seconds without sending after a start: subscribers of a killed core reconnect, every 0.1 s by default, and must get
the first batch, which voids the events of that core."""
MOST_EVENTS: Final = 1024
"""Most blocks of one batch."""
KEPT_BYTES: Final = 64 << 20
"""Most bytes of batches that are kept for the replay socket."""
_MOST_RECEIVED_BYTES: Final = 1 << 10
"""Most bytes of a frame that subscribers may send: topics and numbers are shorter."""
_PATIENCE_S: Final = 5.0
"""Seconds that a replay waits for a subscriber that does not read, before it is aborted."""
_END: Final = (-1).to_bytes(8, "big", signed=True)
_MEDIUM: Final = "GPU"
"""vLLM's word for the memory of the device, whatever that is."""
_PLAIN_ROOT: Final = root_digest(PLAIN)

_log = logging.getLogger(__name__)


class BlockStored(msgspec.Struct, frozen=True, omit_defaults=True, tag=True):
    """Consecutive blocks have entered the prefix cache. block_hashes: the last 64 bits of their digests.

    extra_keys: for each block the keys besides its tokens that distinguish it, None for none: for the first block of a
    prompt with a salt, an adapter or a namespace a name of these together, for images and sounds a name of their
    content.
    """

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: None
    medium: str
    lora_name: None
    extra_keys: list[tuple[str, ...] | None]
    group_idx: int
    kv_cache_spec_kind: str
    kv_cache_spec_sliding_window: int | None = None


class BlockRemoved(msgspec.Struct, frozen=True, omit_defaults=True, tag=True):
    """Blocks have left the prefix cache."""

    block_hashes: list[int]
    medium: str
    group_idx: int


class AllBlocksCleared(msgspec.Struct, frozen=True, tag=True):
    """All earlier events are void: a core has started, or events were lost."""


class _Stored(NamedTuple):
    group: int
    content: Content


class _Removed(NamedTuple):
    group: int
    digest: bytes


class _Lost(NamedTuple):
    """Marks the place of lost events: events before it are void."""


class KvPublisher:
    """A `BlockListener` that publishes what it notes. Blocks that are partly filled are left out, as in vLLM.

    Memory is bounded: a full queue drops all its events, after which subscribers get AllBlocksCleared, and ZeroMQ drops
    batches for a slow subscriber, which notices it by their numbers.
    """

    def __init__(self, config: KvEventsConfig, limits: CacheLimits, replica: int = 0) -> None:
        """Raises ConfigError if an endpoint cannot be used."""
        import zmq

        self._zmq: Any = zmq
        self._limits = limits
        self._replica = replica
        self._topic = config.topic.encode()
        self._queue = Queue[_Stored | _Removed | _Lost | None](config.max_queue_size)
        self._has_sent = False
        self._is_closing = threading.Event()
        self._published: set[tuple[int, bytes]] = set()
        self._buffer_steps = config.buffer_steps
        self._kept: deque[tuple[bytes, bytes]] = deque()
        self._kept_bytes = 0
        self._lock = threading.Lock()
        self._number = 0
        self._context: Any = zmq.Context()
        try:
            self._out = self._open(zmq.PUB, config.endpoint)
            self._out.set_hwm(config.hwm)
            self._attach(self._out, config.endpoint, binds=_is_bound(config.endpoint))
            if config.replay_endpoint is not None:
                replay = self._open(zmq.ROUTER, config.replay_endpoint)
                # sends wait for a slow client; without these options its batches and the end mark would be dropped
                replay.router_mandatory, replay.sndtimeo = True, round(1000 * _PATIENCE_S)
                self._attach(replay, config.replay_endpoint, binds=True)
        except BaseException:
            self._context.destroy(linger=0)
            raise
        self._threads = [threading.Thread(target=self._publish, name="octavo-kv-events", daemon=True)]
        if config.replay_endpoint is not None:
            self._threads.append(
                threading.Thread(target=self._replay, args=[replay], name="octavo-kv-replay", daemon=True)
            )
        for thread in self._threads:
            thread.start()

    def stored(self, group: int, block: int, content: Content) -> None:
        if len(content.token_keys) == self._limits.block_size:
            self._put(_Stored(group, content))

    def removed(self, group: int, digest: bytes) -> None:
        self._put(_Removed(group, digest))

    def close(self) -> None:
        """Publish what has been noted, and end all threads and connections. Idempotent."""
        if not self._threads:
            return
        self._is_closing.set()
        self._queue.put(None)
        self._threads[0].join()
        self._threads.clear()
        self._context.term()  # wakes the thread of the replay socket, which closes it

    def _put(self, event: _Stored | _Removed) -> None:
        try:
            self._queue.put_nowait(event)
        except Full:
            # what waits is void, too: behind a removal that is lost, subscribers would take it for what is there
            with self._queue.mutex:
                self._queue.queue.clear()
            self._queue.put_nowait(_Lost())
            with suppress(Full):  # of a queue for one; nothing is published that this could be about
                self._queue.put_nowait(event)

    def _open(self, kind: int, endpoint: str) -> Any:
        socket = self._context.socket(kind)
        socket.linger, socket.maxmsgsize = 0, _MOST_RECEIVED_BYTES
        socket.ipv6 = "[" in endpoint
        return socket

    def _attach(self, socket: Any, endpoint: str, *, binds: bool) -> None:
        endpoint = own_endpoint(endpoint, self._replica)
        try:
            if binds:
                socket.bind(endpoint)
            else:
                socket.connect(endpoint)
        except self._zmq.ZMQError as error:
            how = "where nothing can listen" if binds else "which cannot be connected to"
            raise ConfigError(f"kv_events_config: the endpoint {endpoint} is one {how}: {error}") from error

    def _publish(self) -> None:
        self._is_closing.wait(REJOIN_S)
        is_open = True
        while is_open:
            events = [self._queue.get()]
            if events != [None]:
                time.sleep(BATCH_S)
            with suppress(Empty):
                while len(events) < MOST_EVENTS:
                    events.append(self._queue.get_nowait())
            is_open = None not in events
            self._send([each for each in events if each is not None])
        self._out.close()

    def _send(self, events: list[_Stored | _Removed | _Lost]) -> None:
        if not (batch := list(self._messages(events))):
            return
        payload = msgspec.msgpack.encode([time.time(), batch, self._replica])
        number = self._number.to_bytes(8, "big")
        self._number += 1
        with self._lock:
            self._kept.append((number, payload))
            self._kept_bytes += len(payload)
            while len(self._kept) > self._buffer_steps or self._kept_bytes > KEPT_BYTES:
                self._kept_bytes -= len(self._kept.popleft()[1])
        self._out.send_multipart((self._topic, number, payload))

    def _messages(self, events: Iterable[_Stored | _Removed | _Lost]) -> Iterator[Any]:
        run: list[Any] = []
        for event in events:
            if not self._notes(event):
                continue
            if run and not _follows(run[-1], event):
                yield self._message(run)
                run = []
            if isinstance(event, _Lost) or not self._has_sent:
                self._has_sent = True  # subscribers of an earlier core have to drop its blocks
                yield AllBlocksCleared()
            if not isinstance(event, _Lost):
                run.append(event)
        if run:
            yield self._message(run)

    def _notes(self, event: _Stored | _Removed | _Lost) -> bool:
        """Note the change of an event for subscribers; return whether it is new to them."""
        if isinstance(event, _Lost):
            _log.warning("KV events came faster than they were published, and some are lost; raise max_queue_size")
            self._published.clear()
        elif isinstance(event, _Stored):
            self._published.add((event.group, event.content.digest))
        elif (event.group, event.digest) in self._published:
            self._published.remove((event.group, event.digest))
        else:
            return False  # it was partly filled, or its event was lost
        return True

    def _message(self, run: list[Any]) -> BlockStored | BlockRemoved:
        group = run[0].group
        if isinstance(run[0], _Removed):
            return BlockRemoved([_hash(each.digest) for each in run], _MEDIUM, group)
        contents, limits = [each.content for each in run], self._limits.groups[group]
        keys = [key for each in contents for key in each.token_keys]
        return BlockStored(
            block_hashes=[_hash(each.digest) for each in contents],
            parent_block_hash=None if contents[0].is_first else _hash(contents[0].parent),
            token_ids=[key if isinstance(key, int) else key[0] for key in keys],
            block_size=self._limits.block_size,
            lora_id=None,
            medium=_MEDIUM,
            lora_name=None,
            extra_keys=[_extra_keys(each) for each in contents],
            group_idx=group,
            kv_cache_spec_kind=_kind(limits),
            kv_cache_spec_sliding_window=limits.window,
        )

    def _replay(self, socket: Any) -> None:
        with suppress(self._zmq.ContextTerminated):
            while True:
                frames = socket.recv_multipart()
                # the frame of a number that no sender needs more than 8 bytes for
                if len(frames) != 3 or len(frames[2]) > 8:
                    _log.warning(
                        "a replay request has %d frames, expected an id, an empty one and a number", len(frames)
                    )
                    continue
                sender, first = frames[0], int.from_bytes(frames[2], "big")
                with self._lock:
                    kept = [each for each in self._kept if int.from_bytes(each[0], "big") >= first]
                try:
                    for number, payload in (*kept, (_END, b"")):
                        socket.send_multipart((sender, b"", number, payload))
                except self._zmq.ContextTerminated:
                    raise
                except self._zmq.ZMQError as error:
                    _log.warning("a replay of KV events ends early, for one who has gone or reads nothing: %s", error)
        socket.close()


def own_endpoint(endpoint: str, replica: int) -> str:
    """Return the endpoint of a replica: of those behind the first one the port is that of the first one plus their
    number, as in vLLM; names that are no ports get the number behind them."""
    if not replica:
        return endpoint
    if not endpoint.startswith("tcp://"):
        return f"{endpoint}_dp{replica}"
    host, _, port = endpoint.rpartition(":")
    return f"{host}:{int(port) + replica}"


def _is_bound(endpoint: str) -> bool:
    """Return whether vLLM listens at this endpoint; it connects to others."""
    return "*" in endpoint or "::" in endpoint or endpoint.startswith(("ipc://", "inproc://"))


def _follows(before: Any, event: Any) -> bool:
    """Return whether an event is about the same as the one before it: the next block, or another removal."""
    if type(before) is not type(event) or before.group != event.group:
        return False
    return isinstance(before, _Removed) or bool(event.content.parent == before.content.digest)


def _hash(digest: bytes) -> int:
    return int.from_bytes(digest[-8:], "big")


def _extra_keys(content: Content) -> tuple[str, ...] | None:
    keys = [content.parent.hex()] if content.is_first and content.parent != _PLAIN_ROOT else []
    media = dict.fromkeys(key[2].hex() for key in content.token_keys if not isinstance(key, int))
    return (*keys, *media) or None


def _kind(limits: GroupLimits) -> str:
    """Return vLLM's name for the kind of KV that the layers of a cache group keep."""
    return "mamba" if limits.is_state else "full_attention" if limits.window is None else "sliding_window"
