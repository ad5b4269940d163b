"""Loads and saves of tiers beside steps."""

from __future__ import annotations

from collections.abc import Iterator
from queue import SimpleQueue

import msgspec
import pytest

from octavo.core.process import frames
from octavo.kv_transfer.messages import Fetched, LoadBlocks, RankCommands, RankNotes, SaveBlocks, TierFolder
from octavo.worker.transfer.block_io import BlockIO
from octavo.worker.transfer.rank_transfer import RankTransfer


class FakeTiers:
    """Has the blocks `DIGEST`, and is full."""

    def __init__(self) -> None:
        self.saved: list[int] = []
        self.dropped: list[bytes] = []
        self.folders: list[TierFolder] = []
        self.is_closed = False

    def load(self, command: LoadBlocks) -> int:
        if command.digests != [DIGEST]:
            raise OSError("the disk is on fire")
        return 96

    def save(self, command: SaveBlocks) -> None:
        self.saved.append(command.save_id)
        raise OSError("the disk is full")

    def drop(self, digests: list[bytes]) -> None:
        self.dropped += digests

    def close(self) -> None:
        self.is_closed = True


DIGEST = b"d" * 32


class Rank:
    """A rank's transfers, and its notes."""

    def __init__(self) -> None:
        self.tiers = FakeTiers()
        self.notes: SimpleQueue[bytes] = SimpleQueue()
        self.transfer = RankTransfer(BlockIO([], [], [], range(0)), [], self.notes.put, lambda: self.tiers)

    def note(self) -> RankNotes:
        return msgspec.msgpack.decode(self.notes.get(timeout=200), type=RankNotes)


@pytest.fixture
def rank() -> Iterator[Rank]:
    rank = Rank()
    yield rank
    rank.transfer.close()


def test_a_load_ends_with_its_bytes_or_its_error(rank: Rank) -> None:
    loads = [LoadBlocks(1, "disk", [DIGEST], [[3]]), LoadBlocks(2, "disk", [b"other"], [[4]])]
    with rank.transfer.step(frames.encode(RankCommands(loads=loads))):
        pass
    (good,), (bad,) = rank.note().fetched, rank.note().fetched
    assert good == Fetched(1, "", 96, good.seconds)
    assert bad == Fetched(2, "OSError: the disk is on fire", 0, bad.seconds)


def test_a_save_begins_after_its_step_and_its_error_ends_nothing(rank: Rank) -> None:
    for save_id in (7, 8):
        payload = frames.encode(RankCommands(saves=[SaveBlocks(save_id, ["disk"], [DIGEST], [[3]])]))
        with rank.transfer.step(payload):
            assert save_id not in rank.tiers.saved
        assert rank.note().saved == [save_id]
    with rank.transfer.step(frames.encode(RankCommands(drops=[DIGEST]))):
        assert not rank.tiers.dropped
    rank.transfer.close()
    assert rank.tiers.dropped == [DIGEST]
    assert rank.tiers.is_closed
