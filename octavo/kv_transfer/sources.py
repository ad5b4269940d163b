"""A connector of several sources of prefixes: other engines, and tiers of this one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from queue import SimpleQueue

import msgspec

from octavo.core.messages import EngineCoreRequest
from octavo.core.process import frames
from octavo.kv_transfer.connector import BlockSource, Connector, Fetch
from octavo.kv_transfer.messages import Fetched, RankCommands, RankNotes


class PrefixSource(BlockSource):
    """A source of blocks, or a receiver of them. It calls `wake` when it has commands or work for `poll`, as the core
    may be idle."""

    def passed(self, request_id: str) -> None:
        """Note that a request was admitted and does not fetch from this source."""

    def poll(self) -> list[tuple[int, str]]:
        """Process received events, before a step is planned. Returns the fetches that have failed before the ranks took
        part, each with the reason."""
        return []

    def commands(self, *, has_work: bool) -> RankCommands:
        """Return the commands of the step that is being planned (`Connector.payload`)."""
        return RankCommands()

    def fetched(self, note: Fetched) -> str:
        """Note that a fetch of this source has ended on all ranks; the note has the time of the slowest rank and the
        most bytes. Returns the error to report, "" for none."""
        return note.error

    def saved(self, save_id: int) -> None:
        """Note that a save of any source has ended on all ranks."""

    def released(self, transfer: bytes) -> None:
        """Note that no rank uses a transfer of any source any more."""


class Sources(Connector):
    """Several sources as one. A request fetches from the one with most of its blocks, the first of equals."""

    def __init__(
        self, sources: Sequence[PrefixSource], num_ranks: int, wake: Callable[[], None], address: str | None = None
    ) -> None:
        self.address = address
        self._sources = sources
        self._num_ranks = num_ranks
        self._wake = wake
        self._notes = SimpleQueue[RankNotes]()
        self._num_notes = Counter[Hashable]()
        self._ended: dict[int, Fetched] = {}
        self._chosen: dict[str, PrefixSource] = {}
        self._fetching: dict[int, PrefixSource] = {}

    def added(self, request: EngineCoreRequest, digests: Sequence[bytes]) -> None:
        for source in self._sources:
            source.added(request, digests)

    def ended(self, request_id: str) -> None:
        self._chosen.pop(request_id, None)
        for source in self._sources:
            source.ended(request_id)

    def find(self, request: EngineCoreRequest, digests: Sequence[bytes]) -> int:
        found = [source.find(request, digests) for source in self._sources]
        most = max(found)
        chosen = self._chosen[request.request_id] = self._sources[found.index(most)]
        for source in self._sources:
            if source is not chosen or not most:
                source.passed(request.request_id)
        return most

    def fetch(self, fetch: Fetch) -> None:
        source = self._fetching[fetch.fetch_id] = self._chosen[fetch.request_id]
        source.fetch(fetch)

    def take_fetched(self) -> list[tuple[int, str]]:
        ended: list[tuple[int, str]] = []
        while not self._notes.empty():
            notes = self._notes.get()
            for each in notes.fetched:
                note = self._ended[each.fetch_id] = each.beside(self._ended.get(each.fetch_id, each))
                if self._is_last(("fetch", each.fetch_id)):
                    del self._ended[each.fetch_id]
                    ended.append((each.fetch_id, self._fetching.pop(each.fetch_id).fetched(note)))
            for save_id in notes.saved:
                if self._is_last(("save", save_id)):
                    for source in self._sources:
                        source.saved(save_id)
            for transfer in notes.ended:
                if self._is_last(("transfer", transfer)):
                    for source in self._sources:
                        source.released(transfer)
        for source in self._sources:
            for fetch_id, error in source.poll():
                del self._fetching[fetch_id]
                ended.append((fetch_id, error))
        return ended

    def _is_last(self, event: Hashable) -> bool:
        """Count a note, and return whether it is that of the last rank."""
        self._num_notes[event] += 1
        is_last = self._num_notes[event] == self._num_ranks
        if is_last:
            del self._num_notes[event]
        return is_last

    def payload(self, step_id: int, *, has_work: bool) -> bytes | None:
        commands = RankCommands()
        for source in self._sources:
            commands += source.commands(has_work=has_work)
        return frames.encode(commands) if commands else None

    def note(self, rank: int, payload: bytes) -> None:
        self._notes.put(msgspec.msgpack.decode(payload, type=RankNotes))
        self._wake()

    @property
    def is_saving(self) -> bool:
        return any(source.is_saving for source in self._sources)

    def end_reads(self) -> None:
        for source in self._sources:
            source.end_reads()

    def end_fetches(self) -> None:
        for source in self._sources:
            source.end_fetches()

    def close(self) -> None:
        for source in self._sources:
            source.close()
