"""Whether the core works, as its front sees it: stopped, hung, or busy with a step that may take its time.

The core notes in memory that both processes share when it began to work and how long a step should take; the front
reads this, asks the system for the state of the process, and pings it, only when somebody wants to know.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final, NamedTuple

from octavo.engine.shared_work import SharedWork
from octavo.errors import EngineUnresponsiveError

_RESPONSE_S: Final = 1.5
"""How long a process that uses no processor time may leave a ping unanswered."""
_LOOK_S: Final = 0.02
_TICK_S: Final = 1 / os.sysconf("SC_CLK_TCK")


class ProcessState(NamedTuple):
    """code: one letter, as in /proc/PID/stat. cpu_s: processor time of all threads so far."""

    code: str
    cpu_s: float

    @classmethod
    def of(cls, pid: int) -> ProcessState | None:
        """None where the system does not say, or when the process has ended."""
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            return None
        return cls(fields[0], (int(fields[11]) + int(fields[12])) * _TICK_S)

    def has_worked_since(self, before: ProcessState) -> bool:
        """Is the process alive without an answer: running, waiting for a device, or using processor time?"""
        return self.code in "RD" or self.cpu_s > before.cpu_s


class CoreHealth:
    """Finds out whether a core works. `ping` returns when the core has answered."""

    def __init__(
        self, ping: Callable[[], Awaitable[object]], pid: int | None = None, work: SharedWork | None = None
    ) -> None:
        self._ping = ping
        self._pid = pid
        self._work = work
        self._pinging: asyncio.Future[object] | None = None

    async def check(self) -> None:
        """Raise EngineUnresponsiveError when the core is stopped or hung, and what `ping` raises.

        Returns within milliseconds when the core is idle or computes, and decides within two seconds otherwise.
        """
        if self._work is not None and (reason := self._work.overdue(time.monotonic())) is not None:
            raise EngineUnresponsiveError(reason)
        began = self._state()
        ping = self._ping_in_progress()
        deadline = time.monotonic() + _RESPONSE_S
        while not (await asyncio.wait({ping}, timeout=_LOOK_S))[0]:
            now = self._state()
            if began is not None and now is not None and now.has_worked_since(began):
                return
            if time.monotonic() > deadline:
                who = "the engine core" if self._pid is None else f"the engine core (process {self._pid})"
                raise EngineUnresponsiveError(f"{who} neither responds nor uses processor time; restart the server")
        ping.result()

    def _state(self) -> ProcessState | None:
        """Raises EngineUnresponsiveError for a stopped process."""
        state = None if self._pid is None else ProcessState.of(self._pid)
        if state is not None and state.code in "Tt":
            raise EngineUnresponsiveError(
                f"the engine core (process {self._pid}) is stopped by a signal or a debugger; kill -CONT {self._pid} "
                "resumes it"
            )
        return state

    def _ping_in_progress(self) -> asyncio.Future[object]:
        """One ping at a time, whoever asks: a core that is stopped for long has only one to answer."""
        if self._pinging is None or self._pinging.done():
            self._pinging = asyncio.ensure_future(self._ping())
            # of a core that dies, an error that nobody may wait for any more
            self._pinging.add_done_callback(lambda ping: ping.cancelled() or ping.exception())
        return self._pinging
