"""KV of prompts that is looked up by tokens: a producer inserts it, a consumer takes it, here or over a `Pipe`.

Tokens under a mask that selects a prefix are named by the digest chain of KV blocks; those under another mask are
compared one by one.
"""

from __future__ import annotations

import logging
import threading
from typing import Annotated, Final, NamedTuple

import msgspec
import torch
from torch import Tensor

from octavo.core.cache_key import PLAIN
from octavo.errors import PipeClosed, PipeError
from octavo.kv_cache.block_hash import extend_chain, root_digest
from octavo.pipes.pipe import Listener, Pipe

_BLOCK_SIZE: Final = 16
_REPLY_S: Final = 30.0
"""Seconds for a reply of the other end of a pipe, besides the time that the call itself waits."""
_MOST_WAIT_S: Final = 60.0
"""Most seconds that a call over a pipe waits, because a server may not notice meanwhile that its client has gone."""

_log = logging.getLogger(__name__)


class Entry(NamedTuple):
    """An inserted entry: tokens [tokens]; roi, a mask of the same shape, None for all; the KV of the tokens under the
    mask, and the hidden state of the last token, each of any shape or None."""

    tokens: Tensor
    roi: Tensor | None = None
    keys: Tensor | None = None
    values: Tensor | None = None
    hidden: Tensor | None = None

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self if tensor is not None)


class _Key(NamedTuple):
    """The tokens under a mask, and the names of their prefixes: the root's, then one for each full block. There are no
    names when the mask selects no prefix."""

    tokens: list[int]
    digests: list[bytes]

    @classmethod
    def of(cls, tokens: Tensor, roi: Tensor | None) -> _Key:
        """Raises ValueError unless tokens are integers [tokens] and the mask has their shape."""
        if tokens.dim() != 1 or tokens.dtype.is_floating_point or tokens.dtype == torch.bool:
            raise ValueError(f"tokens are {list(tokens.shape)} of {tokens.dtype}, must be integers in one dimension")
        if roi is not None and roi.shape != tokens.shape:
            raise ValueError(f"roi has the shape {list(roi.shape)}, tokens have {list(tokens.shape)}")
        mask = torch.ones_like(tokens, dtype=torch.bool) if roi is None else roi.bool()
        chosen: list[int] = tokens[mask].tolist()
        if not mask[: len(chosen)].all():
            return cls(chosen, [])
        return cls(chosen, extend_chain([root_digest(PLAIN)], chosen, _BLOCK_SIZE, PLAIN))

    def common(self, other: _Key, start: int = 0) -> int:
        """Return the length of the shorter sequence of tokens if it is a prefix of the longer, else 0. start: number of
        leading tokens that are known to be equal."""
        length = min(len(self.tokens), len(other.tokens))
        return length if self.tokens[start:length] == other.tokens[start:length] else 0


class LookupBuffer:
    """Holds at most `max_bytes`. When it is full a producer waits, and is refused after its timeout; nothing is
    evicted.

    An entry matches a look-up when the tokens under one mask are a prefix of those under the other, or equal. Positions
    are not compared: under masks that select no prefix the taker has to check the entry's tokens and mask. Of several
    matches the one with the most common tokens is taken, of equals the oldest. Thread-safe. Tensors are not copied.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._changed = threading.Condition()
        self._num_bytes = 0
        self._entries: dict[int, tuple[Entry, _Key]] = {}
        """By number, in the order of insertion."""
        self._by_digest: dict[bytes, dict[int, None]] = {}
        self._unnamed: dict[int, None] = {}
        self._num_inserted = 0
        self._is_closed = False

    @property
    def num_bytes(self) -> int:
        """Bytes of entries, and of those that are being inserted or sent."""
        return self._num_bytes

    def insert(
        self,
        tokens: Tensor,
        roi: Tensor | None,
        keys: Tensor | None,
        values: Tensor | None,
        hidden: Tensor | None,
        wait_s: float | None = None,
    ) -> bool:
        """Insert an entry; returns False when there was no room for `wait_s` seconds (None: it waits without limit), or
        the buffer is closed. Raises ValueError for an entry that is larger than the buffer, or invalid."""
        entry = Entry(tokens, roi, keys, values, hidden)
        key = _Key.of(tokens, roi)
        if not self.reserve(entry.num_bytes, wait_s):
            return False
        self.put(entry, key)
        return True

    def drop_select(self, tokens: Tensor | None, roi: Tensor | None, wait_s: float | None = 0.0) -> Entry | None:
        """Remove and return an entry that matches these tokens under this mask; if `tokens` is None, the oldest one.

        Waits up to `wait_s` seconds for one, None without limit. Raises ValueError for invalid tokens or masks.
        """
        entry = self.take(tokens, roi, wait_s)
        if entry is not None:
            self.release(entry.num_bytes)
        return entry

    def close(self) -> None:
        """End calls that wait in other threads, and drop the entries."""
        with self._changed:
            self._is_closed = True
            self._entries.clear()
            self._by_digest.clear()
            self._unnamed.clear()
            self._changed.notify_all()

    # ---- the parts of the calls above, between which tensors are sent ----

    def reserve(self, num_bytes: int, wait_s: float | None) -> bool:
        """Count bytes that are about to be put; returns False like `insert`. Raises ValueError for more than
        `max_bytes`."""
        if num_bytes > self.max_bytes:
            raise ValueError(f"an entry of {num_bytes} bytes is larger than the buffer, which has {self.max_bytes}")
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or self._num_bytes + num_bytes <= self.max_bytes, wait_s)
            if self._is_closed or self._num_bytes + num_bytes > self.max_bytes:
                return False
            self._num_bytes += num_bytes
            return True

    def put(self, entry: Entry, key: _Key | None = None) -> None:
        """Insert an entry whose bytes are counted already."""
        key = key or _Key.of(entry.tokens, entry.roi)
        with self._changed:
            if self._is_closed:
                return
            number = self._num_inserted = self._num_inserted + 1
            self._entries[number] = (entry, key)
            for each in self._places(key):
                each[number] = None
            self._changed.notify_all()

    def take(self, tokens: Tensor | None, roi: Tensor | None, wait_s: float | None) -> Entry | None:
        """Like `drop_select`, but the bytes stay counted until `release`, or `put` of the same entry."""
        key = None if tokens is None else _Key.of(tokens, roi)
        with self._changed:
            number = self._changed.wait_for(lambda: -1 if self._is_closed else self._find(key), wait_s)
            if number <= 0:
                return None
            entry, key = self._entries.pop(number)
            for digest in key.digests:
                del self._by_digest[digest][number]
                if not self._by_digest[digest]:
                    del self._by_digest[digest]
            self._unnamed.pop(number, None)
            return entry

    def release(self, num_bytes: int) -> None:
        """Stop counting bytes."""
        with self._changed:
            self._num_bytes -= num_bytes
            self._changed.notify_all()

    def _places(self, key: _Key) -> list[dict[int, None]]:
        return [self._by_digest.setdefault(digest, {}) for digest in key.digests] or [self._unnamed]

    def _find(self, key: _Key | None) -> int:
        """Return the number of the entry that matches best, 0 for none."""
        if key is None:
            return next(iter(self._entries), 0)
        best, most = 0, 0
        for num_blocks in reversed(range(len(key.digests))):
            # entries with these blocks; a match in more blocks would have been found before
            for number in self._by_digest.get(key.digests[num_blocks], ()):
                found = key.common(self._entries[number][1], num_blocks * _BLOCK_SIZE)
                if found > most:
                    best, most = number, found
            if best:
                break
        for number in self._unnamed if key.digests else self._entries:
            found = key.common(self._entries[number][1])
            if found > most:
                best, most = number, found
        return best


class _Insert(msgspec.Struct, frozen=True, tag="insert"):
    """Asks to insert an entry. After the reply True its five tensors follow, in the order of `Entry`; then comes a
    second reply."""

    num_bytes: Annotated[int, msgspec.Meta(ge=0)]
    wait_s: float


class _DropSelect(msgspec.Struct, frozen=True, tag="drop_select"):
    """Asks for an entry. The tokens come with it, the mask follows. After the reply True the entry comes, and is
    confirmed."""

    wait_s: float


class _Reply(msgspec.Struct, frozen=True, tag="reply"):
    is_done: bool
    error: str = ""


class LookupServer:
    """Serves `RemoteLookupBuffer`s in the background, a thread for each. An entry that does not arrive is put back."""

    def __init__(self, buffer: LookupBuffer, listener: Listener) -> None:
        self._buffer, self._listener = buffer, listener
        self._pipes: dict[Pipe, threading.Thread] = {}
        self._lock = threading.Lock()
        self._accepting = threading.Thread(target=self._accept, name="octavo-lookup", daemon=True)
        self._accepting.start()

    def close(self) -> None:
        """Stop answering, and close the buffer, which ends what waits in it."""
        self._listener.close()
        self._accepting.join()
        self._buffer.close()
        with self._lock:
            pipes = dict(self._pipes)
        for pipe, thread in pipes.items():
            pipe.close()
            thread.join()

    def _accept(self) -> None:
        while True:
            try:
                pipe = self._listener.accept()
            except PipeClosed:
                return
            thread = threading.Thread(target=self._serve, args=(pipe,), name="octavo-lookup", daemon=True)
            with self._lock:
                self._pipes[pipe] = thread
            thread.start()

    def _serve(self, pipe: Pipe) -> None:
        try:
            while True:
                tensor, header = pipe.recv_tensor()
                request = msgspec.msgpack.decode(header, type=_Insert | _DropSelect)
                try:
                    if isinstance(request, _Insert):
                        self._insert(pipe, request)
                    else:
                        roi, _ = pipe.recv_tensor(_REPLY_S)
                        self._drop_select(pipe, tensor, roi, request.wait_s)
                except ValueError as error:
                    _reply(pipe, is_done=False, error=str(error))
        except (PipeError, msgspec.MsgspecError) as error:
            if not isinstance(error, PipeClosed):
                _log.warning("a client of the lookup buffer is disconnected: %s", error)
        finally:
            pipe.close()
            with self._lock:
                del self._pipes[pipe]

    def _insert(self, pipe: Pipe, request: _Insert) -> None:
        is_reserved = self._buffer.reserve(request.num_bytes, min(request.wait_s, _MOST_WAIT_S))
        _reply(pipe, is_done=is_reserved)
        if not is_reserved:
            return
        try:
            entry = _receive_entry(pipe)
            if entry.num_bytes != request.num_bytes:
                raise ValueError(f"an entry of {entry.num_bytes} bytes, {request.num_bytes} were announced")
            self._buffer.put(entry)
        except BaseException:
            self._buffer.release(request.num_bytes)
            raise
        _reply(pipe, is_done=True)

    def _drop_select(self, pipe: Pipe, tokens: Tensor | None, roi: Tensor | None, wait_s: float) -> None:
        entry = self._buffer.take(tokens, roi, min(wait_s, _MOST_WAIT_S))
        if entry is None:
            _reply(pipe, is_done=False)
            return
        try:
            _reply(pipe, is_done=True)
            _send_entry(pipe, entry)
            pipe.recv_tensor(_REPLY_S)
        except BaseException as error:
            self._buffer.put(entry)
            raise PipeError(f"an entry has not arrived: {error}") from error
        self._buffer.release(entry.num_bytes)


class RemoteLookupBuffer:
    """A `LookupBuffer` of another process, over a pipe to its `LookupServer`. Calls of several threads take turns.

    A call waits at most a minute. Besides what a buffer raises, it raises PipeError when the pipe has failed.
    """

    def __init__(self, pipe: Pipe) -> None:
        self._pipe = pipe
        self._lock = threading.Lock()

    def insert(
        self,
        tokens: Tensor,
        roi: Tensor | None,
        keys: Tensor | None,
        values: Tensor | None,
        hidden: Tensor | None,
        wait_s: float = _MOST_WAIT_S,
    ) -> bool:
        entry = Entry(tokens, roi, keys, values, hidden)
        with self._lock:
            self._pipe.send_tensor(None, msgspec.msgpack.encode(_Insert(entry.num_bytes, wait_s)))
            if not self._reply(wait_s):
                return False
            _send_entry(self._pipe, entry)
            return self._reply(0.0)

    def drop_select(self, tokens: Tensor | None, roi: Tensor | None, wait_s: float = 0.0) -> Entry | None:
        with self._lock:
            self._pipe.send_tensor(tokens, msgspec.msgpack.encode(_DropSelect(wait_s)))
            self._pipe.send_tensor(roi)
            if not self._reply(wait_s):
                return None
            entry = _receive_entry(self._pipe)
            self._pipe.send_tensor(None)
            return entry

    def close(self) -> None:
        """Close the pipe, which ends calls that wait in other threads; the buffer stays."""
        self._pipe.close()

    def _reply(self, wait_s: float) -> bool:
        _, header = self._pipe.recv_tensor(min(wait_s, _MOST_WAIT_S) + _REPLY_S)
        reply = msgspec.msgpack.decode(header, type=_Reply)
        if reply.error:
            raise ValueError(reply.error)
        return reply.is_done


def _reply(pipe: Pipe, *, is_done: bool, error: str = "") -> None:
    pipe.send_tensor(None, msgspec.msgpack.encode(_Reply(is_done, error)))


def _send_entry(pipe: Pipe, entry: Entry) -> None:
    try:
        for tensor in entry:
            pipe.send_tensor(tensor)
    except ValueError:  # a tensor that no pipe carries: the other end still waits for the rest of the entry
        pipe.close()
        raise


def _receive_entry(pipe: Pipe) -> Entry:
    tokens, *others = [pipe.recv_tensor(_REPLY_S)[0] for _ in Entry._fields]
    if tokens is None:
        raise ValueError("an entry has no tokens")
    return Entry(tokens, *others)
