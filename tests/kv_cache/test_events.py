"""What readers get of the events of the prefix index, and what is kept for them."""

from __future__ import annotations

import random

import pytest

from octavo.core.block_events import BlockEvents
from octavo.kv_cache.block_pool import BlockPool, Content
from octavo.kv_cache.events import EventLog


class FakeReader:
    """known: what a reader that applies all events believes to be in the index."""

    def __init__(self) -> None:
        self.known: set[tuple[int, bytes]] = set()
        self.read = [0, 0]
        self.num_resets = 0

    def apply(self, got: BlockEvents) -> None:
        self.read = [7, 7, got.start, got.sequence]  # it reads other engines, too
        if got.is_reset:
            self.num_resets += 1
            self.known.clear()
        for event in got.events:
            if event.parent is None:
                self.known.discard((event.group, event.digest))
            else:
                self.known.add((event.group, event.digest))


def content(digest: bytes) -> Content:
    return Content(digest, b"parent", (1, 2, 3))


@pytest.mark.parametrize("most_removed", [0, 3, 1000])
def test_readers_know_what_is_in_the_index_however_late_they_read(most_removed: int) -> None:
    source, log = random.Random(0), EventLog(most_removed)
    there: set[tuple[int, bytes]] = set()
    readers = [FakeReader() for _ in range(4)]
    for _ in range(2000):
        key = source.randrange(2), b"%d" % source.randrange(20)
        if key in there:
            there.remove(key)
            log.removed(*key)
        else:
            there.add(key)
            log.stored(key[0], 1, content(key[1]))
        for number, reader in enumerate(readers):
            if source.random() < 0.5**number * 0.5:
                reader.apply(log.after(reader.read))
                assert reader.known == there
    assert len(log._removed) <= most_removed
    assert len(log._stored) == len(there)
    assert all((reader.num_resets == 1) == (most_removed == 1000) for reader in readers)


def test_a_reader_gets_each_event_once_in_order_with_its_number_and_time() -> None:
    log = EventLog(clock=iter(range(10, 20)).__next__)
    log.stored(0, 5, content(b"a"))
    log.stored(1, 6, content(b"b"))
    first = log.after([])
    assert first.is_reset
    assert [(e.sequence, e.time, e.group, e.digest, e.parent, e.num_tokens) for e in first.events] == [
        (1, 10, 0, b"a", b"parent", 3),
        (2, 11, 1, b"b", b"parent", 3),
    ]
    log.removed(0, b"a")
    second = log.after([first.start, 2])
    assert not second.is_reset
    assert [(e.sequence, e.digest, e.parent) for e in second.events] == [(3, b"a", None)]
    assert log.after([first.start, 3]).events == []
    assert log.after([first.start + 1, 3]).is_reset  # of another start


def test_the_log_follows_a_pool() -> None:
    pool, log = BlockPool(2), EventLog()
    pool.listeners.append(log)
    for digest in (b"1", b"2", b"3"):
        block = pool.allocate()
        pool.publish(block, content(digest))
        pool.release(block)
    assert [event.digest for event in log.after([]).events] == [b"2", b"3"]
