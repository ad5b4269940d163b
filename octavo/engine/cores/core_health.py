"""The health of the core's process: whether it works, is stopped, or hangs.

The front reads the state of the process from the system and pings it, only when a caller checks its health. The
response of a core that hangs in a step is an error with the reason.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Final

from octavo.core.process.processes import ProcessState
from octavo.errors import EngineUnresponsiveError, RequestFailed

CORE: Final = "the engine core"
"""How messages call a core that has no other name."""

_RESPONSE_S: Final = 1.5
"""How long a process that uses no processor time may leave a ping unanswered."""
_BUSY_S: Final = 900.0
"""How long one that computes may: a call into native code can hold Python's lock that long, but no step should."""
_LOOK_S: Final = 0.02


class CoreHealth:
    """Checks whether a core works. `ping` returns its response, or raises RequestFailed with what it hangs in."""

    def __init__(self, ping: Callable[[], Awaitable[object]], pid: int | None = None, name: str = CORE) -> None:
        self._ping = ping
        self._name = name if pid is None else f"{name} (process {pid})"
        self._pid = pid
        self._pinging: asyncio.Future[object] | None = None
        self._pinged_at = 0.0

    async def check(self) -> None:
        """Raise EngineUnresponsiveError when the core is stopped or hung, and what `ping` raises.

        Returns within milliseconds when the core is idle or computes, and decides within two seconds otherwise.
        """
        began = self._state()
        ping = self._ping_in_progress()
        deadline = time.monotonic() + _RESPONSE_S
        while not (await asyncio.wait({ping}, timeout=_LOOK_S))[0]:
            state = self._state()
            if began is not None and state is not None and state.has_worked_since(began):
                if time.monotonic() - self._pinged_at > _BUSY_S:
                    raise EngineUnresponsiveError(f"{self._name} has computed for {_BUSY_S:g} s without a response")
                return
            if time.monotonic() > deadline:
                raise EngineUnresponsiveError(f"{self._name} neither responds nor uses processor time")
        try:
            ping.result()
        except RequestFailed as error:
            raise EngineUnresponsiveError(str(error)) from error

    def _state(self) -> ProcessState | None:
        """Return the state of the process. Raises EngineUnresponsiveError when it is stopped."""
        state = None if self._pid is None else ProcessState.of(self._pid)
        if state is not None and state.is_stopped:
            raise EngineUnresponsiveError(
                f"{self._name} is stopped by a signal or a debugger; kill -CONT {self._pid} resumes it"
            )
        return state

    def _ping_in_progress(self) -> asyncio.Future[object]:
        """Return the ping in progress, which all callers share: a core that is stopped for long gets a single one."""
        if self._pinging is None or self._pinging.done():
            self._pinging = asyncio.ensure_future(self._ping())
            self._pinged_at = time.monotonic()
            # when the core dies, nothing may await this error any more
            self._pinging.add_done_callback(lambda ping: ping.cancelled() or ping.exception())
        return self._pinging
