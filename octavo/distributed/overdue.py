"""Detects calls on a device that do not end: the host launches them without waiting, so nothing else would notice."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Final, Protocol

LOOK_S: Final = 0.05
"""Seconds between two checks whether a call has ended."""


class Event(Protocol):
    """A mark in the queue of a device's work (as a CUDA event); recording moves it to the end."""

    def record(self) -> None:
        """Mark the work launched so far."""

    def query(self) -> bool:
        """Return whether all work before the mark has been computed. Raises RuntimeError for a failed device."""


class OverdueWatch:
    """A thread that calls `on_overdue` with a reason when no launched call has ended for `deadline_s`."""

    def __init__(
        self,
        event: Event,
        deadline_s: float,
        on_overdue: Callable[[str], None],
        is_capturing: Callable[[], bool] = lambda: False,
    ) -> None:
        """is_capturing: returns whether launches are only captured now (CUDA graph), and computed later."""
        self._is_capturing = is_capturing
        self._event, self._deadline_s, self._on_overdue = event, deadline_s, on_overdue
        self._num_calls = 0
        self._has_calls = threading.Event()
        self._is_closed = False
        threading.Thread(target=self._look, name="octavo-overdue", daemon=True).start()

    def note(self) -> None:
        """Watch the call that was just launched, and all before it."""
        if self._is_capturing():
            return
        self._event.record()
        self._num_calls += 1
        self._has_calls.set()

    def close(self) -> None:
        """End the thread. Idempotent."""
        self._is_closed = True
        self._has_calls.set()

    def _look(self) -> None:
        while not self._is_closed:
            self._has_calls.wait()
            self._has_calls.clear()
            reason = self._wait()
            if reason is not None and not self._is_closed:
                self._on_overdue(reason)
                return

    def _wait(self) -> str | None:
        """Wait for the end of all calls; return the reason if they do not end."""
        since, seen = time.monotonic(), self._num_calls
        while not self._is_closed:
            time.sleep(LOOK_S)
            try:
                if self._event.query():
                    return None
            except RuntimeError as error:
                return f"the device has failed: {error}"
            if self._num_calls != seen:
                since, seen = time.monotonic(), self._num_calls
            elif time.monotonic() - since > self._deadline_s:
                return f"did not end within {self._deadline_s:g} s"
        return None
