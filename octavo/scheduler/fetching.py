"""Requests whose prefix is on its way from a `PrefixSource`: they hold blocks and run nothing until it is there."""

from __future__ import annotations

from collections import deque

from octavo.core.sequence import SequenceGroup
from octavo.kv_cache.allocation import PrefixHit
from octavo.kv_cache.prefix_source import Fetch, PrefixSource
from octavo.scheduler.decisions import DecisionLog
from octavo.scheduler.registry import Registry


class Fetching:
    """Begins fetches for requests that are admitted, and moves those whose fetch has ended to the running ones.

    A request whose fetch failed waits again, and its prompt is computed. The source gets a fetch when the step with
    which it was planned has returned: that step, or one before it, may still read what was in the blocks.
    """

    def __init__(self, registry: Registry, source: PrefixSource, log: DecisionLog) -> None:
        self._registry = registry
        self._block_manager = registry.block_manager
        self._source = source
        self._log = log
        self._num_fetches = 0
        self._failed: set[str] = set()
        self._planned: list[Fetch] = []
        self._unsent: deque[tuple[int, Fetch]] = deque()
        self._last_returned = 0

    def num_blocks(self, group: SequenceGroup, hit: PrefixHit, num_tokens: int) -> int:
        """Return how many blocks behind a hit the source has, of the first `num_tokens` tokens of a waiting request."""
        if hit.missing is None or len(group.live) > 1 or group.request_id in self._failed:
            return 0
        sequence = group.live[0]
        # the last token is computed: its logits are needed
        end = min(num_tokens, len(sequence.token_ids) - 1) // self._block_manager.block_size
        return self._source.find(self._block_manager.digests(sequence)[hit.num_blocks : end])

    def begin(self, group: SequenceGroup, first: int, num_blocks: int) -> None:
        """Fetch `num_blocks` blocks from entry `first` on, for a request that was admitted and has no row yet."""
        self._num_fetches += 1
        fetch_id, sequence = self._num_fetches, group.live[0]
        blocks = self._block_manager.begin_fetch(fetch_id, sequence, first, num_blocks)
        digests = self._block_manager.digests(sequence)[first : first + num_blocks]
        self._registry.begin_fetch(group, fetch_id)
        self._planned.append(Fetch(fetch_id, digests, blocks))
        self._log.note("fetching", group.request, f"{num_blocks} blocks")

    def note_planned(self, step_id: int) -> None:
        """Note the last step that reads what was in the blocks of the fetches that were planned."""
        self._unsent += ((step_id, fetch) for fetch in self._planned)
        self._planned.clear()
        self._send()

    def note_returned(self, step_id: int) -> None:
        """Note that this step and all before it have run."""
        self._last_returned = step_id
        self._send()

    def _send(self) -> None:
        while self._unsent and self._unsent[0][0] <= self._last_returned:
            self._source.fetch(self._unsent.popleft()[1])

    def collect(self, now: float) -> None:
        """Move requests whose fetch has succeeded to the running ones, and queue those whose fetch failed."""
        for fetch_id, is_complete in self._source.take_fetched():
            group = self._registry.end_fetch(fetch_id, now, is_complete=is_complete)
            num_tokens = self._block_manager.end_fetch(fetch_id)
            if group is None:
                continue  # it has ended in the meantime
            sequence = group.live[0]
            if is_complete:
                sequence.num_computed_tokens = num_tokens
                self._block_manager.publish(sequence, group.request.cache_key)
            else:
                self._block_manager.release(sequence)
                sequence.restart()
                self._failed.add(group.request_id)
                self._log.note("not fetched", group.request, "the source failed; the prompt is computed")
        self._failed &= self._registry.groups.keys()
