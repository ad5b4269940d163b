"""Finds calls on a device that do not end: the host that launches them does not wait, so nothing else would."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Final, Protocol

LOOK_S: Final = 0.05
"""How often is looked whether a call has ended."""


class Event(Protocol):
    """A mark in the order of what a device computes, which moves to the end each time that it is recorded."""

    def record(self) -> None:
        """Mark what was launched up to now."""

    def query(self) -> bool:
        """Return whether all that the mark follows has been computed. Raises RuntimeError for a failed device."""


class OverdueWatch:
    """A thread that calls `on_overdue` with a reason when no launched call has ended for `deadline_s`."""

    def __init__(
        self,
        event: Event,
        deadline_s: float,
        on_overdue: Callable[[str], None],
        is_capturing: Callable[[], bool] = lambda: False,
    ) -> None:
        """is_capturing: whether what is launched now is only captured, and computed later."""
        self._is_capturing = is_capturing
        self._event, self._deadline_s, self._on_overdue = event, deadline_s, on_overdue
        self._num_calls = 0
        self._has_calls = threading.Event()
        self._is_closed = False
        threading.Thread(target=self._look, name="octavo-overdue", daemon=True).start()

    def note(self) -> None:
        """Watch over the call that has just been launched, and all before it."""
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
        """Wait for the end of all calls; return why they do not end."""
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
