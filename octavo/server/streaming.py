"""Streams: outputs of several requests as one, and server-sent events that stop when the client does."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

import msgspec
from starlette.types import Receive, Scope, Send

from octavo.core.outputs import RequestOutput
from octavo.server.errors import ClientDisconnectedError, as_api_error
from octavo.server.open_requests import OpenRequests

DONE = b"data: [DONE]\n\n"

_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    # proxies that buffer would turn a stream into one late answer
    (b"x-accel-buffering", b"no"),
]

Outputs = AsyncGenerator[RequestOutput, None]


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
        try:
            async with aclosing(self._events) as events, self._open_requests.track(receive):
                async for data in events:
                    if not started:
                        started = True
                        await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
                    await send({"type": "http.response.body", "body": data, "more_body": True})
        except ClientDisconnectedError:
            raise
        except Exception as error:
            if not started:
                raise
            data = event(msgspec.json.Encoder(), as_api_error(error).body)
            await send({"type": "http.response.body", "body": data, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def merge(streams: Sequence[Outputs]) -> AsyncGenerator[tuple[int, RequestOutput], None]:
    """Outputs of all streams with the index of their stream, as they come; the first error ends them all.

    At most one output per stream is held here, so that a slow reader holds the streams back.
    """
    if len(streams) == 1:
        async with aclosing(streams[0]) as outputs:
            async for output in outputs:
                yield 0, output
        return
    queue: asyncio.Queue[tuple[int, RequestOutput | Exception | None]] = asyncio.Queue(maxsize=1)
    pumps = [asyncio.create_task(_pump(index, stream, queue)) for index, stream in enumerate(streams)]
    num_open = len(pumps)
    try:
        while num_open:
            index, item = await queue.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                num_open -= 1
            else:
                yield index, item
    finally:
        for pump in pumps:
            pump.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)


async def _pump(
    index: int, stream: Outputs, queue: asyncio.Queue[tuple[int, RequestOutput | Exception | None]]
) -> None:
    async with aclosing(stream) as outputs:
        try:
            async for output in outputs:
                await queue.put((index, output))
        except Exception as error:
            # carried to the reader of the queue, which raises it
            await queue.put((index, error))
        else:
            await queue.put((index, None))
