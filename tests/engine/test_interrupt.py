"""Ctrl-C is put off to where it does no harm, and never swallowed."""

from __future__ import annotations

import signal
import threading

import pytest

from octavo.engine.interrupt import deferred_interrupt


def test_first_interrupt_waits_until_it_is_asked_for() -> None:
    with deferred_interrupt() as interrupt:
        interrupt.check()
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            interrupt.check()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_second_interrupt_comes_at_once() -> None:
    with deferred_interrupt():
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_handler_of_the_program_stays_in_charge() -> None:
    seen: list[int] = []
    previous = signal.signal(signal.SIGINT, lambda number, frame: seen.append(number))
    try:
        with deferred_interrupt() as interrupt:
            signal.raise_signal(signal.SIGINT)
            interrupt.check()
    finally:
        signal.signal(signal.SIGINT, previous)
    assert seen == [signal.SIGINT]


def test_other_threads_leave_signals_alone() -> None:
    handlers: list[object] = []

    def look() -> None:
        with deferred_interrupt():
            handlers.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert handlers == [signal.default_int_handler]
