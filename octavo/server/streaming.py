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
            data = event(msgspec.json.Encoder(), as_api_error(error, scope["state"]["request_id"]).body)
            await send({"type": "http.response.body", "body": data, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def merge(streams: Sequence[Outputs]) -> AsyncGenerator[tuple[int, RequestOutput], None]:
    """Outputs of all streams with the index of their stream, as they come; the first error ends them all.

    At most one output per stream is held here, so that a slow reader holds them back, and they take turns.
    """
    if len(streams) == 1:
        async with aclosing(streams[0]) as outputs:
            async for output in outputs:
                yield 0, output
        return
    arrived: asyncio.Queue[tuple[int, asyncio.Future[RequestOutput]]] = asyncio.Queue()
    awaited: dict[int, asyncio.Future[RequestOutput]] = {}

    def ask(index: int) -> None:
        awaited[index] = future = asyncio.ensure_future(anext(streams[index]))
        future.add_done_callback(lambda future: arrived.put_nowait((index, future)))

    for index in range(len(streams)):
        ask(index)
    try:
        while awaited:
            index, future = await arrived.get()
            del awaited[index]
            try:
                output = future.result()
            except StopAsyncIteration:
                continue
            yield index, output
            # asked for only now, so that each stream waits its turn and is read no further than its reader
            ask(index)
    finally:
        for future in awaited.values():
            future.cancel()
        await asyncio.gather(*awaited.values(), return_exceptions=True)
        for stream in streams:
            await stream.aclose()
