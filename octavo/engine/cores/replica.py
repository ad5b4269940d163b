"""One engine core behind the front; a core that dies or freezes is started again."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any, Final, Literal, NamedTuple

import msgspec

from octavo.core.messages import CoreReady, SchedulerStats, StepOutputs
from octavo.engine.cores.core_client import ProcessClient
from octavo.errors import EngineDeadError, EngineRestartingError, EngineUnresponsiveError, OctavoError

WINDOW_S: Final = 600.0
"""Restarts are counted over this time."""

BACK_OFF_S: Final = 1.0
"""The wait before the second restart in `WINDOW_S`; each further one is twice as long. The first does not wait."""
_MOST_BACK_OFF_S: Final = 30.0

WATCH_S: Final = 1.0
"""How long a core with open requests may send nothing before its health is checked."""

FROZEN_AFTER_S: Final = 10.0
"""How long a core may be stopped or hung until it is killed and started again."""

Start = Callable[[int, CoreReady, int], Awaitable[ProcessClient]]
"""Starts another core. It is given the number of the replica, what the core before measured, and how often the replica
was started again, this time included."""

_log = logging.getLogger(__name__)


class ReplicaState(NamedTuple):
    """The state of a replica for operators. stats: after its latest step."""

    number: int
    role: str | None
    state: Literal["ready", "starting", "stopped"]
    stats: SchedulerStats

    @property
    def own_stats(self) -> SchedulerStats:
        """The stats without what a decode core counts as well of prompts that are handed over."""
        twice = ("num_prompt_tokens", "num_generated_tokens", "num_cached_tokens", "num_queried_tokens")
        return msgspec.structs.replace(self.stats, **dict.fromkeys(twice if self.role == "prefill" else (), 0))


class Replica:
    """A core and those that replace it.

    max_restarts: within `WINDOW_S`; None is no limit. role: "prefill" or "decode" where they are apart; None for a core
    that does both.
    is_draining: its core is ended on request. is_stopped: after its core ends, no other is started. has_given_up:
    the core died too often, and no other is started.
    num_open: its requests that have not ended. stats: the state after its latest step; totals count from the start of
    the first core. suspect: the id of the one request that runs here although it was running when a core died.
    """

    def __init__(
        self,
        number: int,
        client: ProcessClient,
        start: Start | None = None,
        max_restarts: int | None = 0,
        role: str | None = None,
    ) -> None:
        self.number = number
        self.role = role
        self.client = client
        self.is_ready = True
        self.is_draining = False
        self.num_open = 0
        self.suspect: str | None = None
        self.is_stopped = False
        self.has_given_up = False
        self.stats = self._idle_stats()
        self._start = start
        self._max_restarts = max_restarts
        self._restarted_at: deque[float] = deque()
        self._num_starts = 0
        self._before: SchedulerStats | None = None
        self._busy = asyncio.Event()

    def _idle_stats(self) -> SchedulerStats:
        cache = self.client.ready.cache
        return SchedulerStats(num_blocks=cache.num_blocks, num_host_blocks=cache.num_host_blocks)

    @property
    def name(self) -> str:
        """The replica in log lines: its role, where it has one, and its number."""
        return f"{self.role or 'replica'} {self.number}"

    @property
    def state(self) -> ReplicaState:
        is_over = self.is_stopped or self.has_given_up
        return ReplicaState(
            self.number, self.role, "ready" if self.is_ready else "stopped" if is_over else "starting", self.stats
        )

    @property
    def can_restart(self) -> bool:
        """Return whether another core may follow the one that has died or is drained."""
        return self._start is not None and not self.is_stopped and (self._max_restarts != 0 or self.is_draining)

    def open(self) -> None:
        """Count a request that the core is sent."""
        self.num_open += 1
        self._busy.set()

    def close(self) -> None:
        """Count a request that has ended, or is moved elsewhere."""
        self.num_open -= 1
        if not self.num_open:
            self._busy.clear()

    def note(self, step: StepOutputs) -> None:
        """Note the state after a step, whose totals count from the start of the first core from now on."""
        if self._before is not None:
            step.stats = self._before + step.stats
        self.stats = step.stats

    def count(self, **totals: int) -> None:
        """Add to totals that the front counts, which go on when the core is replaced."""
        before = self._before or SchedulerStats(num_ready=0)
        self._before = msgspec.structs.replace(
            before, **{name: getattr(before, name) + number for name, number in totals.items()}
        )

    def end(self, num_resumed: int, error: EngineDeadError) -> None:
        """Note that the core has gone, and that so many of its requests go on elsewhere or later."""
        self.is_ready = False
        if self.can_restart and not self.is_draining:
            _log.error("%s: %s", self.name, error)
        totals = self.stats.totals()
        totals.num_resumed += num_resumed
        self.stats = self._before = totals

    async def replace(self, error: EngineDeadError) -> None:
        """Start another core, after a drained one at once.

        Raises EngineDeadError when that was tried too often, or the replica is not to be started again.
        """
        await self.client.shutdown(0.0)
        if self._start is None or not self.can_restart:
            raise EngineDeadError("it was drained") if self.is_draining else error
        while True:
            if not self.is_draining:
                await self._wait_turn(error)
            self._num_starts += 1
            try:
                self.client = await self._start(self.number, self.client.ready, self._num_starts)
                if self.is_stopped:  # meanwhile
                    await self.client.shutdown()
                    raise EngineDeadError("it is not used any more")
            except (OctavoError, OSError) as failure:
                error, self.is_draining = EngineDeadError(str(failure)), False
                if self.is_stopped:
                    raise error from None
                _log.error("%s: %s", self.name, error)
                continue
            assert self._before is not None, "the core before has ended"
            # a new object: others may hold the old one, to count from it
            self._before = msgspec.structs.replace(
                self._before, num_ready=0, num_restarts=self._before.num_restarts + (not self.is_draining)
            )
            self.stats = self._before + self._idle_stats()
            self.is_ready, self.is_draining = True, False
            return

    async def _wait_turn(self, error: EngineDeadError) -> None:
        """Wait until another restart may begin. Raises EngineDeadError when there were too many."""
        restarted_at, now = self._restarted_at, time.monotonic()
        while restarted_at and now - restarted_at[0] > WINDOW_S:
            restarted_at.popleft()
        most = self._max_restarts
        if most is not None and len(restarted_at) >= most:
            raise EngineDeadError(
                f"{error}; it was started again {most} times within {WINDOW_S / 60:g} minutes "
                "(max_core_restarts), and is given up"
            )
        wait_s = min(_MOST_BACK_OFF_S, BACK_OFF_S * 2 ** (len(restarted_at) - 1)) if restarted_at else 0.0
        restarted_at.append(now)
        _log.warning(
            "%s: %s it again%s (%d%s in %g minutes)",
            self.name,
            "connecting to" if most is None else "starting",
            f" in {wait_s:g} s" if wait_s else "",
            len(restarted_at),
            "" if most is None else f" of {most}",
            WINDOW_S / 60,
        )
        await asyncio.sleep(wait_s)

    async def check_health(self) -> None:
        """Raise EngineUnresponsiveError when the core is stopped or hung; then `watch` looks at it, requests or not.

        Raises EngineRestartingError when it has died and another one follows, else EngineDeadError.
        """
        try:
            await self.client.check_health()
        except EngineDeadError as error:
            if not self.can_restart:
                raise
            raise EngineRestartingError(f"{error}; it is started again, try again in a few seconds") from None
        except EngineUnresponsiveError as error:
            self._busy.set()
            follows = f"unless it goes on within {FROZEN_AFTER_S:g} s it is killed and started again"
            raise EngineUnresponsiveError(f"{error}; {follows if self.can_restart else 'restart the server'}") from None

    async def call(self, method: str, *arguments: Any) -> Any:
        """Return the result of a control call; `watch` looks at a core that does not send one."""
        self._busy.set()
        return await self.client.call(method, *arguments)

    async def watch(self) -> None:
        """Kill a core that is stopped or hung for `FROZEN_AFTER_S`, until cancelled.

        Waits, without a timer, while there are no requests and `check_health` finds nothing.
        """
        frozen_since: float | None = None
        while True:
            await self._busy.wait()
            stats = self.stats
            await asyncio.sleep(WATCH_S)
            frozen = await self._frozen() if self.is_ready and self.stats is stats else None
            if frozen is None:
                frozen_since = None
                if not self.num_open:
                    self._busy.clear()
                continue
            frozen_since = time.monotonic() if frozen_since is None else frozen_since
            if time.monotonic() - frozen_since >= FROZEN_AFTER_S:
                self.client.kill(f"{frozen}; it was given up after {FROZEN_AFTER_S:g} s")

    async def _frozen(self) -> EngineUnresponsiveError | None:
        """Return how the core is stopped or hung; None for one that works, or has died and is replaced."""
        try:
            await self.client.check_health()
        except EngineUnresponsiveError as error:
            return error
        except EngineDeadError:
            return None
        return None
