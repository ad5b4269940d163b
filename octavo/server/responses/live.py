"""The events of `GET /live`."""

from __future__ import annotations

from typing import Any

from msgspec import Struct, UnsetType

from octavo.core.live import LiveRow
from octavo.core.messages import Decision, RequestTimeline


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
    """What has changed of one core. `time`, and the times of decisions and timelines, are of its clock, in seconds.

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
    """What has changed of the engine since the event before. cores: by the number of the replica; null for one that is
    no more."""

    cores: dict[str, LiveCore | None]
