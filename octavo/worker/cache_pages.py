"""The memory of KV blocks on a CPU: fetched from the operating system shortly before its first use, and given back."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import Final

from octavo.devices.device import CacheTier
from octavo.ops.pages import LARGE_PAGE_BYTES, fetch, release

_AHEAD: Final = 0.5
"""Share of a region that is left when the next one is fetched: less leaves no time, more takes memory."""


class CachePages:
    """Fetches the large pages of one cache group in threads, at most one region beyond the blocks that are used.

    A region is as many blocks as a large page has in each plane. Without the threads a step that uses the first block
    of a region waits for one large page per plane, of which a model has one or two for each layer.
    """

    def __init__(self, tier: CacheTier) -> None:
        self._tier = tier
        first = tier.caches[0]
        self._num_blocks = first.shape[1]
        self._block_bytes = first.stride(1) * first.element_size()
        self._region = max(1, LARGE_PAGE_BYTES // self._block_bytes)
        self._num_ahead = int(self._region * _AHEAD)
        self._fetched: set[int] = set()
        self._one_at_a_time = threading.Lock()

    def note_used(self, block_ids: Sequence[int]) -> None:
        """Begin to fetch the memory of these blocks, which this step or a later one writes, and of some behind them."""
        size, ahead = self._region, self._num_ahead
        regions = {place // size for block in block_ids for place in (block, block + ahead)} - self._fetched
        if regions:
            self._fetched |= regions
            arguments = sorted(regions), max(block_ids) // size
            threading.Thread(target=self._fetch, args=arguments, name="octavo-kv-pages", daemon=True).start()

    def release(self, block_ids: Iterable[int]) -> None:
        """Give back the memory of these blocks, as far as it is whole large pages."""
        self._fetched.clear()
        for start, count in _runs(sorted(block_ids)):
            for plane in self._tier.planes.tolist():
                release(plane + start * self._block_bytes, count * self._block_bytes)

    def _fetch(self, regions: Iterable[int], last_used: int) -> None:
        # this thread holds the memory: it stays mapped until the last call
        with self._one_at_a_time:
            for region in regions:
                start = region * self._region
                count = min(self._region, self._num_blocks - start)
                for plane in self._tier.planes.tolist() if count > 0 else ():
                    began = time.perf_counter()
                    if not fetch(plane + start * self._block_bytes, count * self._block_bytes):
                        return
                    if region > last_used:  # half of the time belongs to the steps that compute meanwhile
                        time.sleep(time.perf_counter() - began)


def _runs(blocks: Iterable[int]) -> Iterator[tuple[int, int]]:
    """Yield (first block, how many) of each run of ascending numbers without a gap."""
    for _, run in groupby(enumerate(blocks), lambda pair: pair[1] - pair[0]):
        members = [block for _, block in run]
        yield members[0], len(members)
