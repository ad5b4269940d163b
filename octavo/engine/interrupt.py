"""Ctrl-C between steps instead of inside one, so that an engine in this process stays usable."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


class Interrupt:
    """Whether Ctrl-C was pressed."""

    def __init__(self) -> None:
        self.requested = False

    def check(self) -> None:
        """Raise the KeyboardInterrupt that was deferred."""
        if self.requested:
            raise KeyboardInterrupt


@contextmanager
def interrupt_handler(handler: Callable[[int, FrameType | None], None] | signal.Handlers) -> Iterator[None]:
    """Inside, Ctrl-C calls `handler`.

    Nothing changes outside of the main thread, and where the program has a handler of its own.
    """
    is_ours = threading.current_thread() is threading.main_thread()
    if not is_ours or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@contextmanager
def deferred_interrupt() -> Iterator[Interrupt]:
    """Defer the first Ctrl-C until the caller checks for it; a second one raises KeyboardInterrupt at once."""
    interrupt = Interrupt()

    def handle(signal_number: int, frame: FrameType | None) -> None:
        if interrupt.requested:
            raise KeyboardInterrupt
        interrupt.requested = True

    with interrupt_handler(handle):
        yield interrupt
