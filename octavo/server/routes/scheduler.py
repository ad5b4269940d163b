"""`GET /scheduler/decisions` and `GET /scheduler/timelines`: why requests waited, and when they did what.

A key without the right `observe` sees its own requests alone, and of decisions no more than what depends on them alone.
"""

from __future__ import annotations

import time
from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta, Struct
from starlette.requests import Request

from octavo.core.messages import Decision, RequestTimeline
from octavo.server.context import ServerContext
from octavo.server.generation import names_of, without_details_of_others
from octavo.server.keys import Right, caller_of
from octavo.server.schema.scheduler import DecisionEntry, DecisionList, Timeline, TimelineEvent, TimelineList

E = TypeVar("E", Decision, RequestTimeline)


class RequestIdQuery(Struct, frozen=True, forbid_unknown_fields=True):
    """`GET /scheduler/decisions` and `GET /scheduler/timelines`."""

    request_id: Annotated[str, Meta(description="the request that is asked about, instead of all")] | None = None


async def decisions(context: ServerContext, request: Request) -> DecisionList:
    """Return why requests had to wait or were preempted (those of other API keys with the right observe)."""
    found = await _asked_for(context, request, "decisions", Decision)
    offset_s, sees_others = _wall_clock_offset_s(), caller_of(request).may(Right.OBSERVE)
    return DecisionList([_decision(each, offset_s, sees_others) for each in found])


async def timelines(context: ServerContext, request: Request) -> TimelineList:
    """Return what happened to the most recently finished requests (those of other API keys with the right observe)."""
    found = await _asked_for(context, request, "timelines", RequestTimeline)
    offset_s = _wall_clock_offset_s()
    return TimelineList([_timeline(each, offset_s) for each in found])


async def _asked_for(context: ServerContext, request: Request, call: str, kind: type[E]) -> list[E]:
    """Return the cores' records of the requests that the caller asks about and may see."""
    query: RequestIdQuery = request.state.query
    asked, caller = query.request_id, caller_of(request)
    with without_details_of_others(caller):
        entries: list[E] = msgspec.convert(await context.llm.call(call), list[kind])  # type: ignore[valid-type]
    seen = [each for each in entries if caller.may(Right.OBSERVE) or each.tenant == caller.tenant]
    return [each for each in seen if asked is None or asked in names_of(each.request_id)]


def _wall_clock_offset_s() -> float:
    # the core runs on this machine, so its monotonic clock is the same
    return time.time() - time.monotonic()


def _decision(entry: Decision, offset_s: float, sees_others: bool) -> DecisionEntry:
    fields = msgspec.structs.asdict(entry)
    if not sees_others:
        # step numbers depend on the load of all keys, and most reasons name other requests or free blocks
        fields |= {"step": None, "last_step": None, "because": entry.because if entry.kind == "admitted" else ""}
    return DecisionEntry(**fields, wall_time=entry.time + offset_s)


def _timeline(timeline: RequestTimeline, offset_s: float) -> Timeline:
    return Timeline(
        request_id=timeline.request_id,
        tenant=timeline.tenant,
        prompt_tokens=timeline.num_prompt_tokens,
        cached_tokens=timeline.num_cached_tokens,
        completion_tokens=timeline.num_generated_tokens,
        preemptions=timeline.num_preemptions,
        events=[TimelineEvent(time=at, wall_time=at + offset_s, event=event) for at, event in timeline.events],
        replica=timeline.replica,
    )
