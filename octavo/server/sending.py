"""How responses are sent: as server-sent events until the client goes away, or in one piece.

Responses with thousands of log-probabilities are built and encoded beside the event loop, a slice at a time. A thread
releases the interpreter lock after a few milliseconds, but not inside one call, so that long lists are encoded in
slices. One large response is built at a time: the loop waits for one thread at most.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Sequence
from contextlib import aclosing, asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar

import msgspec
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from octavo.core.logprob_list import LogprobList
from octavo.core.outputs import CompletionOutput, RequestOutput
from octavo.server.errors import ApiError, ClientDisconnectedError, as_api_error
from octavo.server.http.turns import FewPerTurn

if TYPE_CHECKING:
    from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

_MOST_ENDS: Final = 16
"""Most requests of disconnected clients that are ended in one turn of the event loop: about 2 ms."""

_EVENTS_OF_TURN: Final = 16
"""Most events that one stream sends in a turn of the event loop: a step of a request with n=256 makes 256 at once."""

SLICE: Final = 512
"""Most entries of a list that are encoded in one call; responses with fewer tokens are built on the event loop."""

_MOST_LOGPROBS_OF_TURN: Final = 8 * SLICE
"""Most log-probabilities of a response that is built on the event loop: 4,096 of a chat take 10 ms."""

DONE = b"data: [DONE]\n\n"
_COMMENT: Final = b": keep-alive\n\n"

_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    # a proxy that buffers would send the whole stream at its end
    (b"x-accel-buffering", b"no"),
]


StreamEvent = dict[str, Any]
"""An event of a stream; its fields depend on its type, or on the new part."""


def event(encoder: msgspec.json.Encoder, chunk: Any) -> bytes:
    return b"data: " + encoder.encode(chunk) + b"\n\n"


def error_event(error: ApiError) -> bytes:
    return event(msgspec.json.Encoder(), error.body)


T = TypeVar("T")
S = TypeVar("S", bound=msgspec.Struct)


class DirectBody:
    """Writes to the body of a response that is being sent, without `send`. It is an extension of the scope of requests
    that octavo's own HTTP protocol has read."""

    NAME: Final = "octavo.body"

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle

    def can_write(self) -> bool:
        """Return whether the response has begun and has not ended, and its client reads."""
        cycle = self._cycle
        return cycle.response_started and not (cycle.response_complete or cycle.disconnected or cycle.flow.write_paused)

    def write(self, data: bytes) -> None:
        is_chunked = self._cycle.chunked_encoding
        self._cycle.transport.write(b"%x\r\n%b\r\n" % (len(data), data) if is_chunked else data)


class ClosesGently:
    """The transport of a response: closing it does not reset the connection, so that the client can read all of it."""

    def __init__(self, transport: asyncio.Transport, close: Callable[[], None]) -> None:
        self.write = transport.write
        self.is_closing = transport.is_closing
        self.close = close


def without_chunks(cycle: RequestResponseCycle, app: ASGIApp) -> ASGIApp:
    """Return `app` with responses without a length ended by closing the connection, as HTTP/1.0 has no chunks."""

    async def respond(scope: Scope, receive: Receive, send: Send) -> None:
        async def send_unframed(message: Message) -> None:
            if message["type"] == "http.response.start":
                if not any(name == b"content-length" for name, _ in message["headers"]):
                    cycle.chunked_encoding = False
            elif cycle.chunked_encoding is False:
                cycle.expected_content_length = len(message.get("body", b""))
            await send(message)

        await app(scope, receive, send_unframed)

    return respond


class OpenRequests:
    """All requests in progress. `started` is set while there is one. is_closing: the server stops, and streams that
    have no end of their own are to end. keep_alive_s: seconds between two comments of a stream, which keep proxies from
    closing it while nothing is generated; 0: no comments.

    All methods run on the event loop.
    """

    def __init__(self, keep_alive_s: float = 0.0) -> None:
        self.started = asyncio.Event()
        self.is_closing = False
        self.keep_alive_s = keep_alive_s
        self._ends = FewPerTurn(_MOST_ENDS)
        # the reason why the task of a request has to end early; None while there is none
        self._reasons: dict[asyncio.Task[Any], Exception | None] = {}
        self._end_of_all: Exception | None = None

    def __len__(self) -> int:
        return len(self._reasons)

    @asynccontextmanager
    async def track(self, receive: Receive) -> AsyncIterator[None]:
        """End the body of the `with` with ClientDisconnectedError when the client closes its connection.

        The rest of the request's body is discarded; if it is too large, its ApiError ends the `with`. After `end_all`
        the reason given there is raised at once.
        """
        if self._end_of_all is not None:
            raise self._end_of_all
        task = asyncio.current_task()
        assert task is not None
        self._reasons[task] = None
        self.started.set()
        watcher = asyncio.create_task(self._end_on_disconnect(task, receive))
        try:
            yield
        except asyncio.CancelledError:
            reason = self._reasons[task]
            if reason is None:
                raise
            # cancelled by `_end`: the task continues, with the reason as an ordinary exception
            task.uncancel()
            raise reason from None
        finally:
            watcher.cancel()
            del self._reasons[task]
            if not self._reasons:
                self.started.clear()

    def end_all(self, reason: Exception) -> None:
        """End all requests for a reason, also those that begin later because they waited for their turn."""
        self._end_of_all = reason
        for task in list(self._reasons):
            self._end(task, reason)

    def _end(self, task: asyncio.Task[Any], reason: Exception) -> None:
        if self._reasons.get(task, reason) is None:  # it is open, and is not ending
            self._reasons[task] = reason
            task.cancel()

    async def _end_on_disconnect(self, task: asyncio.Task[Any], receive: Receive) -> None:
        try:
            while (await receive())["type"] != "http.disconnect":
                pass
        except ApiError as error:  # a body that is not read, and too large
            self._end(task, error)
        else:
            end = partial(self._end, task, ClientDisconnectedError())
            self._ends.add(asyncio.get_running_loop(), end)


class EventStream:
    """A response that sends events as they are made.

    Headers are sent with the first event or comment, so that a request that is refused still gets its status. `events`
    is closed when the client closes its connection, and waits for a slow client. A later error is sent as the last
    event, which `failed` returns.
    """

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        open_requests: OpenRequests,
        failed: Callable[[ApiError], bytes] = error_event,
    ) -> None:
        self._events = events
        self._open_requests = open_requests
        self._failed = failed
        self._has_started = False
        self._turn = asyncio.Lock()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] == "HEAD":  # which a stream without an end would never answer
            await Response(media_type="text/event-stream")(scope, receive, send)
            return
        num_sent = 0
        try:
            async with (
                aclosing(self._events) as events,
                self._open_requests.track(receive),
                Repeated(partial(self._send, send, _COMMENT), self._open_requests.keep_alive_s),
            ):
                async for data in events:
                    await self._send(send, data)
                    num_sent += 1
                    if num_sent % _EVENTS_OF_TURN == 0:
                        await asyncio.sleep(0)
        except ClientDisconnectedError:
            raise
        except Exception as error:
            if not self._has_started:
                raise
            await self._send(send, self._failed(as_api_error(error, scope["state"]["request_id"])))
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send(self, send: Send, data: bytes) -> None:
        async with self._turn:  # events and comments wait for a slow client one after the other
            if not self._has_started:
                await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
                self._has_started = True
            await send({"type": "http.response.body", "body": data, "more_body": True})


class Repeated:
    """Calls `send` every `interval_s` seconds while the body of the `with` runs; with 0 never."""

    def __init__(self, send: Callable[[], Coroutine[Any, Any, None]], interval_s: float) -> None:
        self._send = send
        self._interval_s = interval_s
        self._timer: asyncio.TimerHandle | None = None
        self._sending: asyncio.Task[None] | None = None

    async def __aenter__(self) -> None:
        self._wait()

    async def __aexit__(self, *_: object) -> None:
        if self._sending is not None:  # what is sent halfway, such as headers, is sent to its end
            await self._sending
        if self._timer is not None:
            self._timer.cancel()

    def _wait(self) -> None:
        if self._interval_s:
            self._timer = asyncio.get_running_loop().call_later(self._interval_s, self._begin)

    def _begin(self) -> None:
        self._sending = asyncio.create_task(self._send_one())

    async def _send_one(self) -> None:
        await self._send()
        self._wait()


class LargeResponses:
    """Builds large responses one after the other, in a thread."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()

    async def build(self, build: Callable[[], T]) -> T:
        async with self._lock:
            return await asyncio.to_thread(build)


def is_large(outputs: Sequence[RequestOutput]) -> bool:
    """Return whether a response with these outputs is one to build beside the loop."""
    completions = [completion for output in outputs for completion in output.outputs]
    positions = [position for output in outputs for position in output.prompt_logprobs or ()]
    num_tokens = len(positions) + sum(len(completion.token_ids) for completion in completions)
    if num_tokens > SLICE:
        return True
    num_entries = sum(len(position or ()) for position in positions) + sum(map(num_logprobs, completions))
    return num_entries > _MOST_LOGPROBS_OF_TURN


def num_logprobs(completion: CompletionOutput) -> int:
    """Return how many log-probabilities a sequence has."""
    found = completion.logprobs or ()
    return found.num_entries if isinstance(found, LogprobList) else sum(map(len, found))


def packing(outputs: Sequence[RequestOutput]) -> Callable[[S | None], S | None]:
    """Return a function that encodes the long lists of a part of a large response, so that only one part's lists exist
    as objects at a time. For small responses it returns the part as it is."""
    return _packed if is_large(outputs) else lambda part: part


def _packed(part: S | None) -> S | None:
    if part is None:
        return None
    made: S = _in_slices(part)[0]
    for name in part.__struct_fields__:
        if getattr(made, name) is not getattr(part, name):
            free(getattr(part, name))
    return made


def encode(value: msgspec.Struct) -> bytes:
    """Return the JSON of a response; each call of the encoder gets about `SLICE` entries of its lists at most."""
    return msgspec.json.encode(_in_slices(value)[0])


def free(value: Any) -> None:
    """Empty the lists of objects in a response or in outputs that are no longer read, one object after the other.
    Freeing millions of log-probabilities in one call would block the event loop, from any thread."""
    if isinstance(value, msgspec.Struct):
        for name in value.__struct_fields__:
            free(getattr(value, name))
    elif isinstance(value, list) and value and isinstance(value[0], dict | list | msgspec.Struct | None):
        while value:
            free(value.pop())


def _in_slices(value: Any) -> tuple[Any, int]:
    """Return `value` with its long lists already encoded, and the number of list entries that are not encoded."""
    if isinstance(value, msgspec.Struct):
        lists = {
            name: part
            for name in value.__struct_fields__
            if isinstance(part := getattr(value, name), list | msgspec.Struct)
        }
        parts = {name: _in_slices(part) for name, part in lists.items()}
        changes = {name: part for name, (part, _) in parts.items() if part is not lists[name]}
        num_entries = sum(num for _, num in parts.values())
        return msgspec.structs.replace(value, **changes) if changes else value, num_entries
    if not isinstance(value, list):
        return value, len(value) if isinstance(value, dict) else 0
    is_flat = not value or isinstance(value[0], int | str)
    if is_flat and len(value) <= SLICE:
        return value, len(value)
    slices: list[list[Any]] = [[]]
    has_changed, num_entries, room = False, 0, SLICE
    for item in value:
        part, num = (item, 0) if is_flat else _in_slices(item)
        if room < num + 1 and slices[-1]:
            slices.append([])
            room = SLICE
        slices[-1].append(part)
        has_changed, num_entries, room = has_changed or part is not item, num_entries + num + 1, room - num - 1
    if len(slices) == 1:
        return slices[0] if has_changed else value, num_entries
    return msgspec.Raw(b"[" + b",".join(msgspec.json.encode(each)[1:-1] for each in slices) + b"]"), 0
