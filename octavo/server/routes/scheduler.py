"""`GET /scheduler/decisions` and `GET /scheduler/timelines`: why requests waited, and what became of them."""

from __future__ import annotations

import time

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from octavo.core.messages import Decision, RequestTimeline
from octavo.server.context import ServerContext
from octavo.server.generation import is_about, json_response
from octavo.server.responses import DecisionEntry, DecisionList, Timeline, TimelineEvent, TimelineList


def routes(context: ServerContext) -> list[Route]:
    async def decisions(request: Request) -> Response:
        entries = msgspec.convert(await context.llm.call("decisions"), list[Decision])
        offset_s = _wall_clock_offset_s()
        return json_response(
            DecisionList(
                [
                    DecisionEntry(**msgspec.structs.asdict(entry), wall_time=entry.time + offset_s)
                    for entry in entries
                    if _is_asked_for(request, entry.request_id)
                ]
            )
        )

    async def timelines(request: Request) -> Response:
        found = msgspec.convert(await context.llm.call("timelines"), list[RequestTimeline])
        offset_s = _wall_clock_offset_s()
        return json_response(
            TimelineList([_timeline(each, offset_s) for each in found if _is_asked_for(request, each.request_id)])
        )

    return [
        Route("/scheduler/decisions", decisions, methods=["GET"]),
        Route("/scheduler/timelines", timelines, methods=["GET"]),
    ]


def _is_asked_for(request: Request, request_id: str) -> bool:
    asked = request.query_params.get("request_id")
    return asked is None or is_about(request_id, asked)


def _wall_clock_offset_s() -> float:
    # the core runs on this machine, and so on this monotonic clock
    return time.time() - time.monotonic()


def _timeline(timeline: RequestTimeline, offset_s: float) -> Timeline:
    return Timeline(
        request_id=timeline.request_id,
        prompt_tokens=timeline.num_prompt_tokens,
        cached_tokens=timeline.num_cached_tokens,
        completion_tokens=timeline.num_generated_tokens,
        preemptions=timeline.num_preemptions,
        events=[TimelineEvent(time=at, wall_time=at + offset_s, event=event) for at, event in timeline.events],
    )
