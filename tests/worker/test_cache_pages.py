"""The memory of KV blocks is there before a step writes to it, and no more of it than one region beyond."""

from __future__ import annotations

import mmap
import resource
import sys
import threading

import pytest
import torch

from octavo.ops.pages import LARGE_PAGE_BYTES, Pages, fetch
from octavo.worker.cache_engine import Arena, CacheEngine
from tests.fakes.resident import resident_bytes
from tests.worker.test_cache_engine import device

BLOCK_BYTES = LARGE_PAGE_BYTES // 16


def can_fetch() -> bool:
    pages = Pages(mmap.PAGESIZE)
    return fetch(torch.frombuffer(pages.memory, dtype=torch.uint8).data_ptr(), mmap.PAGESIZE)


pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or not can_fetch(), reason="this system cannot fetch pages ahead of their first use"
)


def make_engine() -> CacheEngine:
    """Keys and values of three layers, of four and a half regions of 16 blocks each."""
    return CacheEngine([Arena([0, 1, 2], (2, 72, BLOCK_BYTES))], torch.uint8, device(kernels=False))


def wait_for_pages() -> None:
    for thread in threading.enumerate():
        if thread.name == "octavo-kv-pages":
            thread.join()


def num_faults_of_writing(engine: CacheEngine, block: int) -> int:
    torch.zeros(2, 2)[:, 0] = 1  # what the first such call takes
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    for cache in engine.caches:
        cache[:, block] = 1
    return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before


def test_steps_that_write_block_after_block_meet_no_fresh_pages() -> None:
    engine, found = make_engine(), []
    for block in range(1, 72):
        engine.note_used(0, [block])
        wait_for_pages()
        found.append(num_faults_of_writing(engine, block))
    assert max(found) <= 2, "of 6 where a region begins"
    assert all(bool(cache[:, 1:].all()) for cache in engine.caches), "what was written stays"


def test_a_prompt_gets_the_memory_of_all_its_blocks() -> None:
    engine = make_engine()
    engine.note_used(0, [*range(1, 60)])
    wait_for_pages()
    assert max(num_faults_of_writing(engine, block) for block in range(1, 60)) <= 2


def test_at_most_one_region_more_than_is_used_takes_memory() -> None:
    engine = make_engine()

    def num_pages() -> list[int]:
        return [resident_bytes(cache) // LARGE_PAGE_BYTES for cache in engine.caches]

    for last, most in ((1, 1), (7, 1), (8, 2), (23, 2), (24, 3)):
        engine.note_used(0, [last])
        wait_for_pages()
        # values begin in the middle of a page, so that a region of them takes up to two
        assert all(2 * most <= pages <= 2 * most + 1 for pages in num_pages()), last


def test_memory_that_was_given_back_is_fetched_again() -> None:
    engine = make_engine()
    engine.note_used(0, [1])
    wait_for_pages()
    engine.release([[*range(1, 72)]])
    engine.note_used(0, [5])
    wait_for_pages()
    assert num_faults_of_writing(engine, 5) <= 2


def test_small_caches_have_no_thread() -> None:
    engine = CacheEngine([Arena([0], (2, 9, 64))], torch.uint8, device(kernels=False))
    engine.note_used(0, [1, 2])
    engine.release([[1, 2]])
    assert all(thread.name != "octavo-kv-pages" for thread in threading.enumerate())
