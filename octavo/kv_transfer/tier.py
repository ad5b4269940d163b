"""A tier as a source of prefixes: blocks are saved after they are published, and fetched if that is faster than
computing."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Final

from octavo.core.messages import EngineCoreRequest
from octavo.kv_cache.block_manager import BlockManager
from octavo.kv_cache.block_pool import Content
from octavo.kv_cache.retention import longest_common
from octavo.kv_transfer.connector import Fetch
from octavo.kv_transfer.fetch_rates import FetchRates, MeasuredRates
from octavo.kv_transfer.file_store import FileStore
from octavo.kv_transfer.messages import Fetched, LoadBlocks, RankCommands, SaveBlocks
from octavo.kv_transfer.sources import PrefixSource

_HELD_SHARE: Final = 16
"""The blocks being saved are at most this fraction (1/N) of a pool, but at least the blocks of one command."""
_SAVED_AT_ONCE: Final = 32
"""Most blocks of a command: they are released together."""
MOST_MISSING: Final = 1 << 14
"""Blocks that could not be loaded and are not looked up again; of more, the oldest are."""
LOOK_S: Final = 1.0
"""Seconds that a step waits for a disk, once; until the disk has responded, nothing is found there."""

_log = logging.getLogger(__name__)


class Tier(PrefixSource):
    """The store of one rank stands for those of all ranks: they write the same names at about the same time.

    Blocks that wait to be saved are not held: one that is evicted before is not saved.
    """

    def __init__(
        self,
        name: str,
        store: FileStore,
        block_manager: BlockManager,
        prefill_tokens_per_s: Callable[[], float | None],
        save_ids: Iterator[int],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """prefill_tokens_per_s: returns how fast prompts are computed; None where that is not known yet. save_ids: ids
        that no other source uses."""
        self._name = name
        self._save_ids = save_ids
        self._store = store
        self._manager = block_manager
        self._clock = clock
        limits = block_manager.limits
        state_bytes = sum(group.block_bytes for group in limits.groups if group.is_state)
        block_bytes = limits.block_bytes - state_bytes
        self.rates = FetchRates(MeasuredRates.read(store.path), limits.block_size, block_bytes, clock(), state_bytes)
        self._prefill_tokens_per_s = prefill_tokens_per_s
        num_blocks = min(group.num_blocks for group in limits.groups)
        self._most_held = max(num_blocks // _HELD_SHARE, min(_SAVED_AT_ONCE, num_blocks // 2))
        self._waiting: dict[bytes, list[int]] = {}
        self._saving: dict[int, list[bytes]] = {}
        self._removed: set[bytes] = set()
        self._found: dict[str, tuple[bytes, int]] = {}
        self._planned: list[Fetch] = []
        self._began: dict[int, tuple[float, Fetch]] = {}
        self._missing: dict[bytes, None] = {}
        self._looking = ThreadPoolExecutor(1, "octavo-kv-look")
        self._look: Future[int] | None = None
        block_manager.listeners.append(self)

    # ---- saves ----

    def stored(self, group: int, block: int, content: Content) -> None:
        """Save a full block with one of the next steps (`BlockListener`)."""
        if len(content.token_keys) == self._manager.block_size:
            self._waiting.setdefault(content.digest, [0] * len(self._manager.groups))[group] = block

    def removed(self, group: int, digest: bytes) -> None:
        """Cancel the save of a block, and check with the next step whether its file must be removed
        (`BlockListener`)."""
        blocks = self._waiting.get(digest)
        if blocks is not None:
            blocks[group] = 0
            if not any(blocks):
                del self._waiting[digest]
        self._removed.add(digest)

    def _drops(self) -> list[bytes]:
        """Return the digests removed from the pools without an eviction: their content was found to be wrong."""
        pools = [cache.pool for cache in self._manager.groups]
        removed, self._removed = self._removed, set()
        return [digest for digest in removed if not any(pool.was_evicted(digest) for pool in pools)]

    def commands(self, *, has_work: bool) -> RankCommands:
        loads = [LoadBlocks(each.fetch_id, self._name, each.digests, each.block_ids) for each in self._planned]
        self._began |= {fetch.fetch_id: (self._clock(), fetch) for fetch in self._planned}
        self._planned = []
        drops = self._drops() if self._removed else []
        return RankCommands(loads=loads, saves=self._saves() if self._waiting else [], drops=drops)

    def _saves(self) -> list[SaveBlocks]:
        room = self._most_held - sum(map(len, self._saving.values()))
        digests = list(itertools.islice(self._waiting, max(0, min(room, _SAVED_AT_ONCE))))
        if not digests or not self._store.is_saving:
            return []
        save_id = next(self._save_ids)
        by_digest = [self._waiting.pop(digest) for digest in digests]
        block_ids = [list(blocks) for blocks in zip(*by_digest, strict=True)]
        self._manager.holds.hold(("save", save_id), block_ids)
        self._saving[save_id] = digests
        return [SaveBlocks(save_id, [self._name], digests, block_ids)]

    def saved(self, save_id: int) -> None:
        if save_id in self._saving:
            self._manager.holds.end(("save", save_id))
            for digest in self._saving.pop(save_id):
                self._missing.pop(digest, None)

    @property
    def is_saving(self) -> bool:
        return self._store.is_saving and bool(self._waiting or self._saving)

    # ---- fetches ----

    def find(self, request: EngineCoreRequest, digests: Sequence[bytes]) -> int:
        if not digests:
            return 0
        first, num_found = self._found.get(request.request_id, (b"", 0))
        num_found = min(num_found, len(digests)) if first == digests[0] else 0
        num_found += self._num_there(
            list(itertools.takewhile(lambda each: each not in self._missing, digests[num_found:]))
        )
        self._found[request.request_id] = digests[0], num_found
        is_worth_it = self.rates.is_worth_fetching(num_found, self._prefill_tokens_per_s(), self._clock())
        return num_found if is_worth_it else 0

    def _num_there(self, digests: list[bytes]) -> int:
        """Return how many leading blocks the store has. A thread checks: a step waits for `LOOK_S` at most, and the
        result is 0 until the store has responded."""
        if self._look is not None and not self._look.done():
            return 0
        self._look = self._looking.submit(self._count, digests)
        try:
            return self._look.result(LOOK_S)
        except TimeoutError:
            _log.warning("tier %s has not responded within %g s: prompts are computed meanwhile", self._name, LOOK_S)
            return 0

    def _count(self, digests: list[bytes]) -> int:
        caches = self._manager.groups
        finds = [partial(self._find_file, cache.index) for cache in caches]
        return len(longest_common([cache.retention for cache in caches], finds, digests)[0][0])

    def _find_file(self, group: int, digest: bytes) -> int | None:
        """Return any number in place of a block's id, None if the store does not have the block."""
        return 1 if self._store.has(digest, group) else None

    def ended(self, request_id: str) -> None:
        self._found.pop(request_id, None)

    def fetch(self, fetch: Fetch) -> None:
        self._planned.append(fetch)

    def fetched(self, note: Fetched) -> str:
        began, fetch = self._began.pop(note.fetch_id)
        if note.error:
            # another rank may lack what this store has: until it is saved again, it is not there
            self._missing |= dict.fromkeys(fetch.digests)
            for digest in list(self._missing)[: max(0, len(self._missing) - MOST_MISSING)]:
                del self._missing[digest]
            self._found.clear()
            return f"tier {self._name}: {note.error}"
        now = self._clock()
        self.rates.note(note.num_bytes, note.seconds, now - began - note.seconds, now)
        return ""

    def close(self) -> None:
        if self in self._manager.listeners:
            self._manager.listeners.remove(self)
        self._looking.shutdown(wait=False, cancel_futures=True)
        self.rates.write(self._store.path, self._prefill_tokens_per_s())
        self._store.close()
