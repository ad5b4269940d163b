"""A tier on the scheduler's side: what is saved and when, what is found, and what is worth fetching."""

from __future__ import annotations

import itertools
import threading
from pathlib import Path

import pytest

from octavo.core.cache_limits import LIVE_STATES, CacheLimits, GroupLimits
from octavo.kv_cache.block_manager import BlockManager
from octavo.kv_cache.block_pool import BlockPool
from octavo.kv_transfer import tier
from octavo.kv_transfer.connector import Fetch
from octavo.kv_transfer.fetch_rates import MeasuredRates
from octavo.kv_transfer.file_store import FileStore
from octavo.kv_transfer.messages import Fetched, LoadBlocks, RankCommands, SaveBlocks
from octavo.kv_transfer.tier import MOST_MISSING, Tier
from tests.fakes.block_manager import cached
from tests.fakes.engine import make_request
from tests.kv_transfer.test_file_store import KEY

SIZE = 4
REQUEST = make_request("r", range(9))


class Desk:
    """A tier over a pool of blocks of 4 tokens, and the rank that saves."""

    def __init__(self, folder: Path, num_blocks: int = 64, tokens_per_s: float | None = None) -> None:
        self.manager = BlockManager(CacheLimits.of_one_group(num_blocks, SIZE, block_bytes=1000))
        self.store = FileStore(folder, KEY, 1 << 20)
        self.now = 0.0
        self.tokens_per_s = tokens_per_s
        self.tier = Tier(
            "disk", self.store, self.manager, lambda: self.tokens_per_s, itertools.count(), lambda: self.now
        )

    @property
    def pool(self) -> BlockPool:
        return self.manager.groups[0].pool

    def publish(self, digest: bytes, num_tokens: int = SIZE) -> int:
        """Return a cached block with this content."""
        return cached(self.pool, digest, range(num_tokens))

    def save(self) -> RankCommands:
        commands = self.tier.commands(has_work=True)
        for save in commands.saves:
            for digest in save.digests:
                self.store.write(digest, 0, [memoryview(digest)])
        return commands

    def find(self, *digests: bytes) -> int:
        return self.tier.find(REQUEST, digests)

    def fetch(self, note: Fetched, *digests: bytes) -> str:
        """Fetch blocks, and return the error."""
        self.tier.fetch(Fetch(note.fetch_id, "r", list(digests), [[1] * len(digests)]))
        assert self.tier.commands(has_work=False).loads == [
            LoadBlocks(note.fetch_id, "disk", list(digests), [[1] * len(digests)])
        ]
        return self.tier.fetched(note)


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    return Desk(tmp_path)


def test_full_blocks_are_saved_once_and_held_until_all_ranks_have_them(desk: Desk) -> None:
    first, second = desk.publish(b"1"), desk.publish(b"2")
    desk.publish(b"tail", num_tokens=3)
    assert desk.tier.commands(has_work=True) == RankCommands(
        saves=[SaveBlocks(0, ["disk"], [b"1", b"2"], [[first, second]])]
    )
    assert [desk.pool.num_users(block) for block in (first, second)] == [1, 1]
    assert not desk.tier.commands(has_work=True)
    desk.tier.saved(7)  # another source's
    assert len(desk.manager.holds) == 1
    desk.tier.saved(0)
    assert len(desk.manager.holds) == 0


def test_few_blocks_are_held_at_once_and_the_others_follow(tmp_path: Path) -> None:
    desk = Desk(tmp_path, num_blocks=40)
    digests = [bytes([number]) for number in range(30)]
    for digest in digests:
        desk.publish(digest)
    (first,) = desk.save().saves
    assert first.digests == digests[:20]
    assert not desk.save()
    desk.tier.saved(first.save_id)
    assert desk.save().saves[0].digests == digests[20:]


def test_what_is_evicted_before_it_is_saved_is_not_saved(tmp_path: Path) -> None:
    desk = Desk(tmp_path, num_blocks=16)
    digests = [bytes([number]) for number in range(18)]
    saved = []
    for digest in digests:
        desk.publish(digest)
    for _ in digests:
        for save in desk.save().saves:
            saved += save.digests
            desk.tier.saved(save.save_id)
    assert saved == digests[2:]


def test_wrong_content_is_removed_and_evicted_content_stays(tmp_path: Path) -> None:
    desk = Desk(tmp_path, num_blocks=16)
    desk.publish(b"wrong")
    desk.tier.saved(desk.save().saves[0].save_id)
    desk.pool.invalidate(b"wrong")
    assert desk.tier.commands(has_work=True).drops == [b"wrong"]
    desk.publish(b"old")
    for number in range(16):
        desk.publish(bytes([number]))
    assert desk.pool.find(b"old") is None
    assert desk.tier.commands(has_work=True).drops == []


def test_content_that_was_wrong_and_is_stored_again_is_removed_before_it_is_saved(desk: Desk) -> None:
    desk.publish(b"1")
    desk.save()
    desk.pool.invalidate(b"1")
    desk.publish(b"1")
    commands = desk.tier.commands(has_work=True)
    assert (commands.drops, [save.digests for save in commands.saves]) == ([b"1"], [[b"1"]])


def test_the_leading_blocks_that_are_there_are_found(desk: Desk) -> None:
    for digest in (b"1", b"2", b"4"):
        desk.store.write(digest, 0, [memoryview(digest)])
    assert desk.find(b"1", b"2", b"3", b"4") == 2
    desk.store.write(b"3", 0, [memoryview(b"3")])
    assert desk.find(b"1", b"2", b"3", b"4") == 4
    assert desk.find(b"2", b"5") == 1
    assert desk.find() == 0


def test_blocks_of_a_failed_load_are_not_found_until_they_are_saved_again(desk: Desk) -> None:
    desk.publish(b"1")
    save = desk.save().saves[0]
    desk.tier.saved(save.save_id)
    assert desk.find(b"1") == 1
    assert desk.fetch(Fetched(3, "LookupError: it is not there"), b"1") == "tier disk: LookupError: it is not there"
    assert desk.find(b"1") == 0
    desk.pool.invalidate(b"1")
    desk.publish(b"1")
    desk.tier.saved(desk.save().saves[0].save_id)
    assert desk.find(b"1") == 1


def test_what_a_broken_store_lacks_takes_limited_memory(desk: Desk) -> None:
    for number in range(MOST_MISSING // 1024 + 2):
        digests = [b"%d %d" % (number, i) for i in range(1024)]
        desk.fetch(Fetched(number, "the disk is lost"), *digests)
    assert len(desk.tier._missing) == MOST_MISSING
    assert digests[-1] in desk.tier._missing


def test_blocks_behind_one_that_a_rank_lacks_are_not_found_in_its_place(desk: Desk) -> None:
    for digest in (b"1", b"2", b"3"):
        desk.store.write(digest, 0, [memoryview(digest)])
    desk.fetch(Fetched(3, "LookupError: it is not there"), b"2")
    assert desk.find(b"1", b"2", b"3") == 1


def test_short_prefixes_are_computed_where_that_is_faster(tmp_path: Path) -> None:
    desk = Desk(tmp_path, tokens_per_s=4000.0)
    digests = [bytes([number]) for number in range(20)]
    for digest in digests:
        desk.store.write(digest, 0, [memoryview(digest)])
    assert desk.find(digests[0]) == 1  # nothing is measured yet
    desk.tier.fetch(Fetch(1, "r", digests[:8], [[0] * 8]))
    desk.tier.commands(has_work=True)
    desk.now = 0.018
    desk.tier.fetched(Fetched(1, "", 8000, 0.016))
    # a block takes 2 ms and is computed in 1 ms
    assert desk.find(*digests) == 0
    desk.tokens_per_s = 1000.0  # it is computed in 4 ms; the load waits 2 ms
    assert desk.find(digests[0]) == 1
    desk.tier.rates.measured.latency_s = 0.007
    assert [desk.find(*digests[:count]) for count in (1, 3, 4, 20)] == [0, 0, 4, 20]
    desk.now += 100.0  # the tier may have become faster
    assert desk.find(digests[0]) == 1


def test_the_next_engine_begins_with_what_was_measured(tmp_path: Path) -> None:
    desk = Desk(tmp_path, tokens_per_s=4000.0)
    desk.store.write(b"1", 0, [memoryview(b"1")])
    desk.fetch(Fetched(1, "", 1000, 0.002), b"1")
    desk.tier.close()
    measured = MeasuredRates.read(desk.store.path)
    assert (measured.bytes_per_s, measured.prefill_tokens_per_s) == (500_000.0, 4000.0)
    assert all(path.stat().st_mode & 0o077 == 0 for path in desk.store.path.iterdir())
    later = Desk(tmp_path)
    assert later.find(b"1") == 0
    later.tokens_per_s = 1000.0
    assert later.find(b"1") == 1
    (desk.store.path / "rates").write_text("{damaged")
    assert Desk(tmp_path).find(b"1") == 1


def test_the_break_even_length_says_from_what_it_follows() -> None:
    assert "not measured yet" in MeasuredRates().render(16, 1000)
    measured = MeasuredRates(bytes_per_s=1e6, latency_s=0.045, prefill_tokens_per_s=1000.0)
    assert measured.render(16, 1000) == (
        "prefixes of 48 tokens or more are fetched: the last engine loaded 1.0 MB/s with a latency of 45.0 ms, and "
        "computed 1,000 tokens/s"
    )
    assert "no length" in measured.render(16, 100_000)


def test_nothing_is_commanded_when_the_store_no_longer_saves(desk: Desk) -> None:
    desk.store.is_saving = False
    desk.publish(b"1")
    assert not desk.tier.commands(has_work=True)
    desk.tier.close()
    desk.publish(b"2")
    assert not desk.pool.listeners


def test_a_disk_that_hangs_delays_one_step_and_is_used_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    desk, may_go_on = Desk(tmp_path), threading.Event()
    desk.publish(b"a" * 32)
    desk.save()
    has = desk.store.has
    monkeypatch.setattr(desk.store, "has", lambda *block: may_go_on.wait(200) and has(*block))
    monkeypatch.setattr(tier, "LOOK_S", 0.01)
    assert [desk.find(b"a" * 32) for _ in range(3)] == [0, 0, 0]
    monkeypatch.setattr(tier, "LOOK_S", 200.0)
    assert caplog.text.count("tier disk has not responded") == 1
    assert desk.tier._look is not None
    may_go_on.set()
    assert desk.tier._look.result() == 1
    assert desk.find(b"a" * 32) == 1


def test_a_prefix_with_states_ends_where_the_tier_has_one(tmp_path: Path) -> None:
    groups = (
        GroupLimits(num_blocks=64, block_bytes=1000),
        GroupLimits(num_blocks=8, block_bytes=9000, max_live_tokens=LIVE_STATES, is_state=True),
    )
    store = FileStore(tmp_path, KEY, 1 << 20)
    manager = BlockManager(CacheLimits(block_size=SIZE, groups=groups))
    source = Tier("disk", store, manager, lambda: None, itertools.count(), lambda: 0.0)
    digests = [bytes([number]) for number in range(6)]
    for digest in digests:
        store.write(digest, 0, [memoryview(digest)])
    assert source.find(REQUEST, digests) == 0
    store.write(digests[3], 1, [memoryview(b"state")])
    assert source.find(REQUEST, digests) == 4
    source.close()


def test_a_state_is_loaded_once_however_long_its_prefix_is() -> None:
    measured = MeasuredRates(bytes_per_s=1e6, latency_s=0.0, prefill_tokens_per_s=1000.0)
    assert measured.break_even_blocks(16, 1000) == 1
    assert measured.break_even_blocks(16, 1000, 150_000) == 10
