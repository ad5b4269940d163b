"""Requests whose prefix a `Connector` supplies: they hold blocks, and are not planned until it has arrived."""

from __future__ import annotations

from octavo.core.sequence import SequenceGroup
from octavo.kv_cache.allocation import PrefixHit
from octavo.kv_transfer.connector import Connector, Fetch
from octavo.scheduler.registry import Registry


class Fetching:
    """Begins fetches for requests that are admitted, and moves those whose fetch has ended to the running ones.

    A request whose fetch failed waits again, and its prompt is computed. The connector gets a fetch behind the step
    with which it was planned: that step, or one before it, may still read what was in the blocks.
    """

    def __init__(self, registry: Registry, connector: Connector) -> None:
        self._registry = registry
        self._block_manager = registry.block_manager
        self._connector = connector
        self._num_fetches = 0
        self._failed: set[str] = set()
        self._planned: list[Fetch] = []
        self._coming: dict[int, set[tuple[str, bytes]]] = {}
        """The blocks of each fetch, by its id, each with the engine that sends it."""
        self._ended: list[int] = []
        """Fetches whose last blocks are published with the step being planned."""

    def is_coming(self, group: SequenceGroup, hit: PrefixHit) -> bool:
        """Return whether another request fetches the block that a group lacks next, from the same engine: the block,
        which may be the tail, is not sent twice."""
        engine, sequence = group.request.prefill, group.live[0]
        if engine is None or not any(self._coming.values()) or hit.num_tokens >= len(sequence.token_ids) - 1:
            return False
        missing = self._digests(group)[hit.num_blocks : hit.num_blocks + 1]
        return any((engine, digest) in coming for coming in self._coming.values() for digest in missing)

    def find(self, group: SequenceGroup, hit: PrefixHit, num_tokens: int) -> int:
        """Return how many blocks behind a hit the connector can fetch for a request of `num_tokens` tokens; it chooses
        the source for the `begin` that may follow."""
        is_alone = len(group.live) == 1 and group.may_read_prefix_cache and self._block_manager.enable_prefix_caching
        if not is_alone or group.request_id in self._failed:
            return 0
        is_there = hit.num_tokens >= num_tokens - 1
        return self._connector.find(group.request, [] if is_there else self._digests(group)[hit.num_blocks :])

    def _digests(self, group: SequenceGroup) -> list[bytes]:
        """Return the names of a group's blocks up to that of its last known token, if that is one of the prompt."""
        sequence, manager = group.live[0], self._block_manager
        if group.has_output:
            return manager.digests(sequence)[: (len(sequence.token_ids) - 1) // manager.block_size]
        return manager.transfer_digests(sequence, group.request.cache_key)

    def begin(self, group: SequenceGroup, first: int, num_blocks: int) -> None:
        """Fetch `num_blocks` blocks from entry `first` on, for a request that was admitted and has no row yet."""
        self._num_fetches += 1
        fetch_id, sequence = self._num_fetches, group.live[0]
        blocks = self._block_manager.begin_fetch(fetch_id, sequence, first, num_blocks)
        digests = self._digests(group)[first : first + num_blocks]
        self._registry.begin_fetch(group, fetch_id)
        engine = group.request.prefill
        self._coming[fetch_id] = set() if engine is None else {(engine, digest) for digest in digests}
        self._planned.append(Fetch(fetch_id, group.request_id, digests, blocks))
        self._registry.log.note("fetching", group.request, f"{num_blocks} blocks")

    def payload(self, step_id: int, *, has_work: bool) -> bytes | None:
        """Return what a step sends to the ranks, and begin the fetches that were planned with it behind it."""
        planned, self._planned = self._planned, []
        if not has_work:  # no step reads what was in the blocks
            self._begin(planned)
            if self._registry.has_queued and not self._registry.on_device:
                self._connector.end_reads()
        payload = self._connector.payload(step_id, has_work=has_work)
        if has_work:
            self._begin(planned)
        return payload

    def _begin(self, fetches: list[Fetch]) -> None:
        for fetch in fetches:
            self._connector.fetch(fetch)

    def end_transfers(self) -> None:
        """End what other engines read of the local pools and what is fetched from them; the requests that wait for it
        compute it. Blocks are free when the ranks have ended it, which later steps find."""
        self._connector.end_reads()
        self._connector.end_fetches()

    def collect(self, now: float) -> None:
        """Move requests whose fetch has succeeded to the running ones, and queue those whose fetch failed."""
        for fetch_id in self._ended:
            del self._coming[fetch_id]
        self._ended.clear()
        for fetch_id, error in self._connector.take_fetched():
            group = self._registry.end_fetch(fetch_id, now, is_complete=not error)
            if error or group is None:
                del self._coming[fetch_id]
            else:
                self._ended.append(fetch_id)
            num_tokens = self._block_manager.end_fetch(fetch_id)
            if group is None:
                continue  # the request has ended in the meantime
            sequence = group.live[0]
            if not error:
                group.num_fetched_tokens = num_tokens - sequence.num_computed_tokens
                self._registry.stats.num_fetched_tokens += group.num_fetched_tokens
                sequence.num_computed_tokens = num_tokens
                self._block_manager.publish(sequence, group.request.cache_key)
            else:
                self._block_manager.release(sequence)
                sequence.restart()
                self._failed.add(group.request_id)
                self._registry.log.note("not fetched", group.request, f"{error}; the prompt is computed")
        self._failed &= self._registry.groups.keys()
