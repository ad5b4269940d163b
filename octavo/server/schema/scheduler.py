"""The responses of `GET /scheduler/decisions` and `GET /scheduler/timelines`."""

from __future__ import annotations

from msgspec import Struct


class DecisionEntry(Struct, frozen=True, kw_only=True):
    """A decision. `time` is in seconds on the engine's monotonic clock, `wall_time` the same moment in Unix seconds.

    Without the right `observe` steps are null, and `because` is empty where it depends on other requests.
    """

    step: int | None
    last_step: int | None
    time: float
    wall_time: float
    kind: str
    request_id: str
    because: str
    tenant: str | None
    replica: int | None


class DecisionList(Struct, frozen=True):
    """Response of `GET /scheduler/decisions`: the last ones, oldest first."""

    decisions: list[DecisionEntry]


class TimelineEvent(Struct, frozen=True, kw_only=True):
    """An event of a request, in words, with its times as in `DecisionEntry`."""

    time: float
    wall_time: float
    event: str


class Timeline(Struct, frozen=True, kw_only=True):
    """The events of a request that has ended."""

    request_id: str
    tenant: str | None
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    preemptions: int
    events: list[TimelineEvent]
    replica: int | None


class TimelineList(Struct, frozen=True):
    """Response of `GET /scheduler/timelines`: the most recently finished requests, oldest first."""

    timelines: list[Timeline]
