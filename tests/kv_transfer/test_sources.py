"""Several sources behind one connector: who supplies a prefix, and when something has ended on all ranks."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from octavo.core.messages import EngineCoreRequest
from octavo.core.process import frames
from octavo.kv_transfer.connector import Connector, Fetch
from octavo.kv_transfer.messages import Fetched, LoadBlocks, RankCommands, RankNotes
from octavo.kv_transfer.sources import PrefixSource, Sources
from tests.fakes.engine import make_request


class Shelf(PrefixSource):
    """Has the first blocks of everything."""

    def __init__(self, name: str, num_blocks: int) -> None:
        self.name = name
        self.num_blocks = num_blocks
        self.ends: list[object] = []
        self.failed: list[tuple[int, str]] = []
        self._commands = RankCommands()

    def find(self, request: EngineCoreRequest, digests: Sequence[bytes]) -> int:
        return min(self.num_blocks, len(digests))

    def fetch(self, fetch: Fetch) -> None:
        self._commands.loads.append(LoadBlocks(fetch.fetch_id, self.name, fetch.digests, fetch.block_ids))

    def poll(self) -> list[tuple[int, str]]:
        failed, self.failed = self.failed, []
        return failed

    def commands(self, *, has_work: bool) -> RankCommands:
        commands, self._commands = self._commands, RankCommands()
        return commands

    def fetched(self, note: Fetched) -> str:
        self.ends.append(note.fetch_id)
        return note.error and f"{self.name}: {note.error}"

    def saved(self, save_id: int) -> None:
        self.ends.append(save_id)

    def released(self, transfer: bytes) -> None:
        self.ends.append(transfer)


def make() -> tuple[Shelf, Shelf, Sources, list[str]]:
    near, far, wakes = Shelf("near", 2), Shelf("far", 3), list[str]()
    return near, far, Sources([near, far], 2, lambda: wakes.append("wake")), wakes


DIGESTS = [b"0", b"1", b"2", b"3"]


def fetch(connector: Connector, fetch_id: int, num_digests: int) -> int:
    request = make_request(f"r{fetch_id}", range(9))
    connector.added(request, DIGESTS)
    num_blocks = connector.find(request, DIGESTS[:num_digests])
    connector.fetch(Fetch(fetch_id, request.request_id, DIGESTS[:num_blocks], [list(range(num_blocks))]))
    return num_blocks


def test_the_source_with_most_blocks_supplies_them_and_the_first_of_equals() -> None:
    _, _, connector, _ = make()
    assert (fetch(connector, 1, 4), fetch(connector, 2, 2)) == (3, 2)
    payload = connector.payload(1, has_work=True)
    assert payload is not None
    commands = msgspec.msgpack.decode(payload, type=RankCommands)
    assert [each.tier for each in commands.loads] == ["near", "far"]
    assert connector.payload(2, has_work=True) is None


def test_a_fetch_has_ended_when_all_ranks_have_said_so_and_failed_when_one_has() -> None:
    near, far, connector, wakes = make()
    for fetch_id in (1, 2):
        fetch(connector, fetch_id, 4)
    connector.note(0, frames.encode(RankNotes(fetched=[Fetched(1), Fetched(2, "it is torn")])))
    assert (connector.take_fetched(), wakes) == ([], ["wake"])
    connector.note(1, frames.encode(RankNotes(fetched=[Fetched(2), Fetched(1)])))
    assert connector.take_fetched() == [(2, "far: it is torn"), (1, "")]
    assert (near.ends, far.ends) == ([], [2, 1])


def test_a_source_may_fail_a_fetch_without_the_ranks() -> None:
    _, far, connector, _ = make()
    fetch(connector, 1, 4)
    far.failed.append((1, "it has gone"))
    assert connector.take_fetched() == [(1, "it has gone")]


def test_saves_and_transfers_have_ended_when_all_ranks_have_said_so() -> None:
    near, far, connector, _ = make()
    for rank in range(2):
        assert connector.take_fetched() == []
        assert (near.ends, far.ends) == ([], [])
        connector.note(rank, frames.encode(RankNotes(saved=[5], ended=[b"t"])))
    connector.take_fetched()
    assert near.ends == far.ends == [5, b"t"]
