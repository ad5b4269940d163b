"""Control calls: those that wait for their results, one result made of those of several cores, and those that a core
which is started again gets."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import reduce
from operator import add
from typing import Any, Final

import msgspec

from octavo.config.schema import EngineConfig
from octavo.core.messages import Call, CallResult, SchedulerStats, Shutdown
from octavo.core.process import frames
from octavo.errors import EngineDeadError, RequestFailed

NOT_WAITED_FOR: Final = 0
"""The id of calls whose result nothing waits for."""
_OF_WEIGHTS: Final = ("sleep", "wake_up", "update_weights")
_OF_PAUSES: Final = ("pause", "resume", "sleep", "wake_up")
CHANGING: Final = frozenset(_OF_WEIGHTS + _OF_PAUSES)
"""The calls that begin or end a pause or a sleep."""


Replies = list[tuple[int, Any]]
"""What replicas answered to a control call, with their numbers: values, and the exceptions of those that failed."""

CallEach = Callable[[str, Sequence[Any]], Awaitable[Replies]]

_log = logging.getLogger(__name__)


def failure_of(replies: Replies) -> BaseException | None:
    """Return the first exception among replies; None where there is none."""
    return next((value for _, value in replies if isinstance(value, BaseException)), None)


class OpenCalls:
    """The control calls over one connection whose results have not come back."""

    def __init__(self) -> None:
        self._results: dict[int, asyncio.Future[Any]] = {}
        self._num_calls = 0

    async def make(self, send: Callable[[Call], None], method: str, arguments: Iterable[Any]) -> Any:
        """Send a call and return its result, as built-in types. Raises the error that it is resolved with."""
        self._num_calls += 1
        call = Call(self._num_calls, method, list(arguments))
        result = self._results[call.call_id] = asyncio.get_running_loop().create_future()
        try:
            send(call)
            return await result
        finally:
            del self._results[call.call_id]

    def resolve(self, result: CallResult, error_of: Callable[[str], Exception]) -> None:
        """Pass a result to its caller. error_of: makes the exception of an error."""
        call = self._results.get(result.call_id)
        if call is None or call.done():
            return
        if result.error is not None:
            call.set_exception(error_of(result.error))
        else:
            call.set_result(msgspec.msgpack.decode(result.value))

    def fail(self, error: Exception) -> None:
        """Let all calls raise an error: no further result comes."""
        for call in self._results.values():
            if not call.done():
                call.set_exception(error)


class CallingClient:
    """The end of a connection over which control calls are made. After its end everything raises EngineDeadError."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._calls = OpenCalls()
        self._error: EngineDeadError | None = None

    @property
    def is_running(self) -> bool:
        """Return False once what is at the other end has gone, or `shutdown` was called."""
        return self._error is None

    def send(self, message: msgspec.Struct) -> None:
        """Send a message; one to an end that has gone is dropped until that is known. Raises EngineDeadError."""
        if self._error is not None:
            raise self._error
        self._write(message)

    async def call(self, method: str, *arguments: Any) -> Any:
        """Return the result of a control call, as built-in types. Raises RequestFailed with the reason of the other
        end, or the error that it has met."""
        return await self._calls.make(self.send, method, arguments)

    def _write(self, message: msgspec.Struct) -> None:
        if not self._writer.is_closing():  # a transport of uvloop raises RuntimeError then
            self._writer.write(frames.pack(message))

    def begin_shutdown(self) -> None:
        """Let the other end stop, the first time."""
        if self._error is None:
            self._write(Shutdown())
            self._die("the engine has been shut down")

    def _die(self, message: str) -> None:
        self._error = EngineDeadError(message)
        self._calls.fail(self._error)


class LastingCalls:
    """What calls have set: pins that have not ended, other weights and their label, sleep, and a pause."""

    def __init__(self) -> None:
        self._until: dict[tuple[Any, ...], float] = {}
        self._weights: list[Any] | None = None
        """The arguments of the last update, in a list of its own for each."""
        self._sleeps = False
        self._paused: list[Any] | None = None
        """The arguments of the pause that is on."""
        self._version: list[Any] | None = None
        """The arguments of the last call that labelled the weights."""
        self._in_progress: list[tuple[str, tuple[Any, ...]]] = []
        self._started_with: dict[int, list[Any] | None] = {}

    @contextmanager
    def begun(self, method: str, arguments: tuple[Any, ...]) -> Iterator[None]:
        """Inside, a call is in progress: a core that is started meanwhile gets it, too."""
        if method not in (*_OF_WEIGHTS, *_OF_PAUSES, "set_weight_version"):
            yield
            return
        call = method, arguments
        self._in_progress.append(call)
        try:
            yield
        finally:
            self._in_progress.remove(call)

    def note(self, method: str, arguments: tuple[Any, ...], result: Any) -> None:
        """Note a control call that was made."""
        self._paused = self._pause_after(method, arguments, self._paused)
        match method, arguments:
            case "pin_prefix", (token_ids, ttl_s, *key):
                now = time.monotonic()
                self._until = {pin: until for pin, until in self._until.items() if until > now}
                self._until[tuple(token_ids), *key] = now + ttl_s
            case "unpin_prefix", (token_ids, *key):
                self._until.pop((tuple(token_ids), *key), None)
            case "reset_prefix_cache", _ if result:
                self._until.clear()
            case "pause", (_, True):  # which forgets them, at once or soon
                self._until.clear()
            case "set_weight_version", _:
                self._version = list(arguments)
            case method, _ if method in _OF_WEIGHTS:
                self._until.clear()
                self._sleeps = method == "sleep"
                if method == "update_weights":
                    self._weights = list(arguments)

    @staticmethod
    def _pause_after(method: str, arguments: Iterable[Any], before: list[Any] | None) -> list[Any] | None:
        """Return the arguments of the pause that is on after a call, from those before it."""
        return list(arguments) if method == "pause" else None if method in _OF_PAUSES else before

    async def make(self, call: CallEach, method: str, arguments: tuple[Any, ...], num_replicas: int) -> Replies:
        """Make a call with `call`, which sends it to all replicas that are ready; return the replies. A core that is
        started meanwhile gets it, too. Other weights are taken by all, or by none. num_replicas: ready or not."""
        with self.begun(method, arguments):
            if method == "update_weights":
                return await self._update_weights(call, arguments, num_replicas)
            return await call(method, arguments)

    async def _update_weights(self, call: CallEach, arguments: tuple[Any, ...], num_replicas: int) -> Replies:
        replies = await call("check_weights", arguments)
        if failure_of(replies) is not None:
            return replies
        replies = await call("update_weights", arguments)
        failure = failure_of(replies)
        if failure is None or num_replicas == 1:  # an engine alone sleeps until it has weights that can be read
            return replies
        _log.warning("a replica could not take other weights: %s; all go back to those that they had", failure)
        before = tuple(self._weights or [None])
        with self.begun("update_weights", before):  # a core that is ready from here on gets these last
            returned = await call("update_weights", before)
            if self._sleeps:
                with self.begun("sleep", ()):
                    await call("sleep", ())
        went_back = failure_of(returned) is None
        what = "all replicas go on with the weights that they had" if went_back else f"and back: {failure_of(returned)}"
        return [(number, RequestFailed(f"{failure}; {what}")) for number, _ in replies]

    def started(self, number: int, config: EngineConfig) -> EngineConfig:
        """Return the configuration, with the weights that calls have set, with which a replica is started again."""
        self._started_with[number] = self._weights
        return config if self._weights is None else config.with_weights(self._weights[0])

    def send_to(self, number: int, send: Callable[[Call], None]) -> None:
        """Send the calls of `calls`."""
        for call in self.calls(number):
            send(call)

    def calls(self, number: int) -> Iterator[Call]:
        """Yield the calls that the core of a replica gets when it has started."""
        weights, sleeps, paused, version = self._weights, self._sleeps, self._paused, self._version
        for method, arguments in self._in_progress:
            paused = self._pause_after(method, arguments, paused)
            version = list(arguments) if method == "set_weight_version" else version
            if method in _OF_WEIGHTS:
                weights, sleeps = list(arguments) if method == "update_weights" else weights, method == "sleep"
        if weights is not None and weights is not self._started_with.get(number):
            yield Call(NOT_WAITED_FOR, "update_weights", weights)
        if version is not None:
            yield Call(NOT_WAITED_FOR, "set_weight_version", version)
        if sleeps:
            yield Call(NOT_WAITED_FOR, "sleep", [])
        if paused is not None:
            yield Call(NOT_WAITED_FOR, "pause", paused)
        now = time.monotonic()
        for (token_ids, *key), until in self._until.items():
            if until > now:
                yield Call(NOT_WAITED_FOR, "pin_prefix", [list(token_ids), until - now, *key])


def merged(method: str, values: Sequence[tuple[int, Any]]) -> Any:
    """Return one result of a control call from those of several replicas, given with their numbers."""
    results = [value for _, value in values]
    match method:
        case "stats":
            return msgspec.to_builtins(reduce(add, msgspec.convert(results, list[SchedulerStats])))
        case "reset_prefix_cache" | "pause" | "pause_is_complete":
            return all(results)
        case "unpin_prefix" | "is_sleeping" | "is_paused":
            return any(results)
        case "pin_prefix":
            return min(results, key=lambda pinned: (pinned["num_tokens"], pinned["num_cached_tokens"]))
        case "get_weight_version" if len(set(results)) > 1:
            found = ", ".join(f"{version!r} of replica {number}" for number, version in values)
            raise RequestFailed(f"replicas have different weight versions: {found}; update the version of all")
        case "read_adapter":
            return next(filter(None, results), None if None in results else "")
        case "decisions" | "timelines":
            entries = [entry | {"replica": number} for number, value in values for entry in value]
            return sorted(entries, key=_time_of)
        case "kv_events" | "live":
            return [entry | {"replica": number} for number, value in values for entry in value]
    return results[0]


def _time_of(entry: dict[str, Any]) -> float:
    """Return the time of a decision, or that of the last event of a timeline."""
    return float(entry["time"] if "time" in entry else entry["events"][-1][0])
