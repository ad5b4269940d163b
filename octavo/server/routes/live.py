"""`GET /live`: the state of the engine as it changes, for the page."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Mapping
from typing import Any, Final

import msgspec
from msgspec import UNSET, Struct, UnsetType
from starlette.requests import Request

from octavo.core.live import LiveRow, LiveState
from octavo.core.messages import Decision, RequestTimeline
from octavo.server.context import ServerContext
from octavo.server.errors import ApiError
from octavo.server.live_feed import IDLE_INTERVAL_S, INTERVAL_S, MOST_WATCHERS, reports
from octavo.server.sending import EventStream, event

_HISTORY_S: Final = 600.0
"""Age in seconds up to which the first event has decisions and ended requests."""
_CHUNK: Final = 256
"""Blocks that are compared at once."""


class MapChange(Struct, frozen=True):
    """What has changed in the blocks of a tier ("device" or "host") of a cache group.

    runs: the first block of each run, counted from 0, how many there are, and what each of them is now: in the lowest
    three bits free, cached, used by a request, shared by several, pinned or held (0 to 5), above them the number of a
    request that uses it. Before the first event all blocks are free. num_blocks is 0 for a tier that
    is no longer in use.
    """

    tier: str
    group: int
    num_blocks: int
    runs: list[list[int]]


class LiveCore(Struct, frozen=True):
    """The changes of one core. `time`, and the times of decisions and timelines, are in seconds of its clock.

    stats: the fields of `SchedulerStats` that have changed. requests: of each, by its number, the fields of
    `LiveRequest` that have changed; null for one that has ended. rows: of the last step.
    """

    role: str | None
    time: float
    step_s: float
    stats: dict[str, int]
    requests: dict[str, dict[str, Any] | None]
    rows: list[LiveRow] | UnsetType
    maps: list[MapChange]
    decisions: list[Decision]
    ended: list[RequestTimeline]


class LiveEvent(Struct, frozen=True):
    """The changes of the engine since the previous event. cores: by the number of the replica; null for a replica that
    has ended."""

    cores: dict[str, LiveCore | None]


async def stream(context: ServerContext, request: Request) -> EventStream:
    """Stream what changes in the engine: requests, the last step, KV blocks, decisions. Raises ApiError."""
    return EventStream(_events(context), context.open_requests)


async def _events(context: ServerContext) -> AsyncGenerator[bytes, None]:
    feed, watch, encoder = context.live, Watch(), msgspec.json.Encoder()
    if feed.watchers.locked():
        raise ApiError(429, f"{MOST_WATCHERS} clients watch the engine already", code="too_many_readers")
    async with feed.watchers:
        states = await reports(context.llm, "live", _HISTORY_S, LiveState)
        yield b": live\n\n"
        while not context.open_requests.is_closing:
            changes = watch.changes(states, {each.number: each.role for each in context.llm.replicas})
            if changes is not None:
                yield event(encoder, changes)
            stats, polled_at = context.llm.stats, time.monotonic()
            await asyncio.sleep(feed.pause_s)
            while context.llm.stats == stats and time.monotonic() - polled_at < IDLE_INTERVAL_S:
                await asyncio.sleep(INTERVAL_S)
            states = await feed.states(context.llm)


class Watch:
    """The last state that one client has received."""

    def __init__(self) -> None:
        self._had: dict[int, LiveState] = {}

    def changes(self, states: list[LiveState], roles: Mapping[int, str | None]) -> LiveEvent | None:
        """Return the changes in these reports that the client does not have; None if there are none."""
        cores: dict[str, LiveCore | None] = {}
        for number in self._had.keys() - {state.replica for state in states}:
            del self._had[number]
            cores[str(number)] = None
        for state in states:
            before = self._had.get(state.replica)
            change = _core(before, state, roles.get(state.replica))
            news = (change.stats, change.requests, change.maps, change.decisions, change.ended)
            if before is None or any(news) or change.rows is not UNSET:
                cores[str(state.replica)] = change
            self._had[state.replica] = state
        return LiveEvent(cores) if cores else None


def _core(before: LiveState | None, now: LiveState, role: str | None) -> LiveCore:
    known = before or msgspec.structs.replace(now, requests={}, maps=[], decisions=[], ended=[])
    cells = {(each.tier, each.group): each.cells for each in known.maps}
    ended = {each.request_id for each in known.ended}
    gone: dict[str, dict[str, Any] | None] = {
        str(number): None for number in known.requests.keys() - now.requests.keys()
    }
    changes = {str(number): _changed(known.requests.get(number), each) for number, each in now.requests.items()}
    return LiveCore(
        role=role,
        time=now.time,
        step_s=now.step_s,
        stats=_changed(before and before.stats, now.stats),
        requests=gone | {number: change for number, change in changes.items() if change},
        rows=UNSET if before is not None and before.rows == now.rows else now.rows,
        maps=[
            *(
                MapChange(each.tier, each.group, len(each.cells) // 4, runs)
                for each in now.maps
                if (runs := changed_runs(cells.pop((each.tier, each.group), b""), each.cells)) or before is None
            ),
            *(MapChange(tier, group, 0, []) for tier, group in cells),
        ],
        decisions=[each for each in now.decisions if each not in known.decisions],
        ended=[each for each in now.ended if each.request_id not in ended],
    )


def _changed(before: msgspec.Struct | None, now: msgspec.Struct) -> dict[str, Any]:
    fields = msgspec.structs.asdict(now)
    return {name: value for name, value in fields.items() if before is None or getattr(before, name) != value}


def changed_runs(before: bytes, now: bytes) -> list[list[int]]:
    """Return the runs of blocks whose cells differ, each as its first block, its length and its cell."""
    if len(before) != len(now):
        before = bytes(len(now))
    old, new = memoryview(before).cast("I"), memoryview(now).cast("I")
    runs: list[list[int]] = []
    for start in range(0, len(new), _CHUNK):
        if before[4 * start : 4 * (start + _CHUNK)] == now[4 * start : 4 * (start + _CHUNK)]:
            continue
        for block in range(start, min(start + _CHUNK, len(new))):
            cell = new[block]
            if cell == old[block]:
                continue
            if runs and runs[-1][0] + runs[-1][1] == block and runs[-1][2] == cell:
                runs[-1][1] += 1
            else:
                runs.append([block, 1, cell])
    return runs
