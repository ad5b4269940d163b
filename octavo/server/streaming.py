"""Server-sent events that stop when the client does."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Final

import msgspec
from starlette.types import Receive, Scope, Send

from octavo.server.errors import ClientDisconnectedError, as_api_error
from octavo.server.open_requests import OpenRequests

_EVENTS_OF_TURN: Final = 16
"""Events that are made and sent before others have their turn: a step of a request with n=256 makes as many at once."""

DONE = b"data: [DONE]\n\n"

_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    # proxies that buffer would turn a stream into one late answer
    (b"x-accel-buffering", b"no"),
]


def event(encoder: msgspec.json.Encoder, chunk: msgspec.Struct) -> bytes:
    """One server-sent event."""
    return b"data: " + encoder.encode(chunk) + b"\n\n"


class EventStream:
    """Answers with events as they are made.

    Headers are sent with the first event, so that a request that is refused still gets its status. A client that goes
    away closes `events`, and a slow one holds them back. An error after the first event becomes an event, the last one.
    """

    def __init__(self, events: AsyncGenerator[bytes, None], open_requests: OpenRequests) -> None:
        self._events = events
        self._open_requests = open_requests

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False
        num_sent = 0
        try:
            async with aclosing(self._events) as events, self._open_requests.track(receive):
                async for data in events:
                    if not started:
                        started = True
                        await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
                    await send({"type": "http.response.body", "body": data, "more_body": True})
                    num_sent += 1
                    if num_sent % _EVENTS_OF_TURN == 0:
                        await asyncio.sleep(0)
        except ClientDisconnectedError:
            raise
        except Exception as error:
            if not started:
                raise
            data = event(msgspec.json.Encoder(), as_api_error(error, scope["state"]["request_id"]).body)
            await send({"type": "http.response.body", "body": data, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
