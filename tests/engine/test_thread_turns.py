"""Threads take turns in the order in which they ask."""

from __future__ import annotations

import signal
import threading
import time

import pytest

from octavo.engine.thread_turns import ThreadTurns


def test_threads_get_their_turns_in_the_order_in_which_they_ask() -> None:
    turns, got = ThreadTurns(), list[int]()

    def ask(number: int) -> None:
        with turns, turns:
            got.append(number)

    threads = [threading.Thread(target=ask, args=[number]) for number in range(8)]
    with turns:
        for number, thread in enumerate(threads):
            thread.start()
            while len(turns._waiting) <= number:
                time.sleep(0.001)
    for _ in range(100):  # a loop that never rests takes no turn of theirs
        with turns:
            pass
    for thread in threads:
        thread.join(100)
    assert got == list(range(8))


def test_no_two_threads_have_it_at_once_and_errors_release_it() -> None:
    turns, inside, most = ThreadTurns(), 0, 0

    def fail() -> None:
        nonlocal inside, most
        with turns:
            inside += 1
            most = max(most, inside)
            time.sleep(0)
            inside -= 1
            raise ValueError("one")

    def work() -> None:
        for _ in range(200):
            with pytest.raises(ValueError, match="one"):
                fail()

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(100)
    assert most == 1


def test_a_cancelled_wait_blocks_no_other_turn() -> None:
    turns, is_held, may_end = ThreadTurns(), threading.Event(), threading.Event()

    def hold() -> None:
        with turns:
            is_held.set()
            may_end.wait(100)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    holder = threading.Thread(target=hold)
    holder.start()
    assert is_held.wait(100)
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        with pytest.raises(KeyboardInterrupt), turns:
            pass
    finally:
        signal.signal(signal.SIGALRM, before)
    may_end.set()
    holder.join(100)
    with turns:
        assert not turns._waiting


def test_a_turn_that_is_released_during_a_wait_is_taken_again_as_often() -> None:
    turns, may_end, others = ThreadTurns(), threading.Event(), list[int]()

    def ask() -> None:
        with turns:
            others.append(1)
        may_end.set()

    with turns:
        with turns:
            thread = threading.Thread(target=ask)
            thread.start()
            turns.release_during(lambda: may_end.wait(100))
            assert (others, turns._owner) == ([1], threading.get_ident())
            with pytest.raises(KeyboardInterrupt):
                turns.release_during(_interrupt)
        assert turns._owner == threading.get_ident()
    thread.join(100)
    assert turns._owner is None


def _interrupt() -> None:
    raise KeyboardInterrupt


def test_an_interrupt_while_a_released_turn_is_awaited_leaves_the_turn_with_its_thread() -> None:
    turns, is_held = ThreadTurns(), threading.Event()

    def hold() -> None:
        with turns:
            is_held.set()
            time.sleep(0.1)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    holder = threading.Thread(target=hold)

    def wait() -> None:
        holder.start()
        assert is_held.wait(100)
        signal.setitimer(signal.ITIMER_REAL, 0.02)

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        with turns:
            with pytest.raises(KeyboardInterrupt):
                turns.release_during(wait)
            assert turns._owner == threading.get_ident()
    finally:
        signal.signal(signal.SIGALRM, before)
    holder.join(100)
    assert turns._owner is None
