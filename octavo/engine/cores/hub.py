"""The engine cores of several API servers: the hub, a process between them, has the cores as one front would.

An API server connects through a socket of its own. What it sends goes to the cores, and outputs go to the server that
has the request. When a core dies its requests go on elsewhere, from what the hub has passed on of them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from typing import Any, Final

import msgspec

from octavo.core.messages import (
    AbortRequests,
    AddRequests,
    Call,
    CallResult,
    CoreFailed,
    CoreReady,
    EngineCoreOutput,
    EngineCoreRequest,
    SchedulerStats,
    SequenceDelta,
    Shutdown,
    StepOutputs,
    StopSequence,
)
from octavo.core.outputs import RequestError, RequestMetrics
from octavo.core.process import frames
from octavo.core.resume import ResumedSequence
from octavo.engine.control_calls import OpenCalls
from octavo.engine.cores.replica import ReplicaState
from octavo.engine.cores.replicas import Replicas
from octavo.errors import EngineDeadError, EngineRestartingError, OctavoError, RequestFailed

STATS_INTERVAL_S: Final = 0.5
"""How often a server whose requests have no output gets the state of the cores while they work."""

MOST_UNREAD_BYTES: Final = 64 << 20
"""Outputs that may wait for a server to read them; then it counts as hung."""

ANSWER_S: Final = 1.0
"""How long a server may take to answer another one."""


class Attached(msgspec.Struct, kw_only=True, tag="attached"):
    """The first message to a server: the cores, and their states in the order of `states`."""

    ready: CoreReady
    can_grow: bool
    states: list[ReplicaState]


class ReplicaOutputs(msgspec.Struct, tag="replica"):
    """Outputs of a core, of the requests of this server, and the core's state. is_removed: the replica is no longer
    used.
    """

    state: ReplicaState
    outputs: list[EngineCoreOutput]
    is_removed: bool = False


FromHub = Attached | ReplicaOutputs | Call | CallResult | CoreFailed
"""What a server gets. The calls are `OF_OTHERS`, of other servers."""
OF_OTHERS: Final = ("counts", "abort")
"""Calls that other servers answer: `counts` with those of their metrics, `abort` with how many requests it ended."""

ToHub = AddRequests | AbortRequests | StopSequence | Call | CallResult | Shutdown


class _OpenRequest:
    """An open request of a server, and the outputs that were passed on to it."""

    def __init__(self, request: EngineCoreRequest, link: _Link) -> None:
        self.link = link
        self._request = request
        self._metrics = request.metrics or RequestMetrics.begin(request.arrival_time)
        self._num_cached_tokens = request.num_cached_tokens
        self._sequences = [ResumedSequence(index=index, token_ids=[]) for index in range(request.params.width)]
        for each in request.resumed:
            self._sequences[each.index] = _copied(each)

    def take(self, output: EngineCoreOutput) -> None:
        """Note an output, but not the tokens of a beam search: on another core it starts again."""
        self._metrics = output.metrics or self._metrics
        self._num_cached_tokens = max(self._num_cached_tokens, output.num_cached_tokens)
        if not self._request.params.use_beam_search:
            for delta in output.deltas:
                _extend(self._sequences[delta.index], delta)

    def stop(self, index: int) -> bool:
        """Note that the server has ended a sequence; return whether it was the last."""
        if index < len(self._sequences):
            sequence = self._sequences[index]
            sequence.finish_reason = sequence.finish_reason or "stop"
        return all(each.finish_reason is not None for each in self._sequences)

    def to_resume(self) -> EngineCoreRequest:
        """Return the request with what was passed on, for another core."""
        sequences = map(_copied, self._sequences)
        return self._request.continued(sequences, self._metrics, self._num_cached_tokens, time.monotonic())


def _copied(sequence: ResumedSequence) -> ResumedSequence:
    return msgspec.structs.replace(sequence, token_ids=list(sequence.token_ids))


def _extend(sequence: ResumedSequence, delta: SequenceDelta) -> None:
    """Add what a step brought to what a sequence has produced."""
    sequence.token_ids += delta.token_ids
    for each in delta.logprobs:
        if each.logprob is not None:
            sequence.cumulative_logprob = (sequence.cumulative_logprob or 0.0) + each.logprob
    if delta.finish_reason is not None:
        sequence.finish_reason, sequence.stop_reason = delta.finish_reason, delta.stop_reason


class _Link:
    """The connection of one server."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self.request_ids: set[str] = set()
        self.sent_at = 0.0
        self.calls = OpenCalls()
        self._writer = writer

    def send(self, message: FromHub) -> None:
        """Send a message. A server that reads too little is disconnected."""
        if self._writer.is_closing():
            return
        self._writer.write(frames.pack(message))
        if self._writer.transport.get_write_buffer_size() > MOST_UNREAD_BYTES:
            self._writer.transport.abort()


class Hub:
    """Serves API servers from the cores of `replicas`. One event loop."""

    def __init__(self, replicas: Replicas) -> None:
        self._replicas = replicas
        self._open: dict[str, _OpenRequest] = {}
        self._links: list[_Link] = []
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Pass on the outputs of the cores. Raises EngineDeadError when no core is left; the servers have it then."""
        try:
            await self._replicas.run(self._process, self._to_resume)
        except EngineDeadError as error:
            for link in self._links:
                link.send(CoreFailed(message=str(error)))
            raise

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one API server until it closes its connection; its requests end then."""
        link = _Link(writer)
        decoder = msgspec.msgpack.Decoder(ToHub)
        ready = self._replicas.ready
        if self._links:
            ready = msgspec.structs.replace(ready, plan="")  # the first server has logged it
        link.send(Attached(ready=ready, can_grow=self._replicas.can_grow, states=self._replicas.states))
        self._links.append(link)
        try:
            while (body := await frames.read_async(reader)) is not None:
                message = decoder.decode(body)
                if isinstance(message, Shutdown):
                    return
                self._take(message, link)
        finally:
            self._links.remove(link)
            self._abort(list(link.request_ids))
            writer.close()

    # ---- from the servers ----

    def _take(self, message: AddRequests | AbortRequests | StopSequence | Call | CallResult, link: _Link) -> None:
        match message:
            case AddRequests(requests):
                self._add(requests, link)
            case AbortRequests(request_ids):
                self._abort([each for each in request_ids if each in link.request_ids])
            case StopSequence(request_id, index):
                if request_id in link.request_ids:
                    if self._open[request_id].stop(index):
                        self._forget(request_id)
                    self._replicas.send(message)
            case CallResult():
                link.calls.resolve(message, RequestFailed)
            case Call():
                task = asyncio.create_task(self._call(message, link))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

    def _add(self, requests: list[EngineCoreRequest], link: _Link) -> None:
        taken = next((each.request_id for each in requests if each.request_id in self._open), None)
        try:
            if taken is not None:
                raise EngineRestartingError(f"another API server has a request with the id {taken}; send it again")
            for each in requests:
                self._open[each.request_id] = _OpenRequest(each, link)
                link.request_ids.add(each.request_id)
            self._replicas.send(AddRequests(requests))
        except (EngineDeadError, EngineRestartingError) as error:
            failure = RequestError(str(error), code="engine_dead")
            if isinstance(error, EngineRestartingError):
                failure = RequestError(str(error), code="engine_restarting", retry_after_s=error.retry_after_s)
            for each in requests if taken is None else ():
                self._forget(each.request_id)
            outputs = [EngineCoreOutput.failed(each.request_id, failure) for each in requests]
            message = self._about(next(iter(self._replicas.roles)))
            link.send(msgspec.structs.replace(message, outputs=outputs))

    def _abort(self, request_ids: Iterable[str]) -> None:
        aborted = list(request_ids)
        for request_id in aborted:
            self._forget(request_id)
        if aborted and self._replicas.is_running:
            self._replicas.send(AbortRequests(aborted))

    def _forget(self, request_id: str) -> None:
        entry = self._open.pop(request_id, None)
        if entry is not None:
            entry.link.request_ids.discard(request_id)

    async def _call(self, call: Call, link: _Link) -> None:
        try:
            value = await self._result_of(call, link)
        except OctavoError as error:
            failure = CoreFailed(message=str(error), kind=type(error).__name__)
            link.send(CallResult(call_id=call.call_id, error=msgspec.json.encode(failure).decode()))
        else:
            link.send(CallResult(call_id=call.call_id, value=msgspec.Raw(frames.encode(value))))

    async def _result_of(self, call: Call, link: _Link) -> Any:
        match call.method:
            case "check_health":
                return await self._replicas.check_health()
            case "drain":
                number, stops = call.arguments
                return await self._replicas.drain(number, stops=bool(stops))  # type: ignore[arg-type]
            case method if method in OF_OTHERS:
                return await self._answers_of_others(call, link)
        return await self._replicas.call(call.method, *call.arguments)

    async def _answers_of_others(self, call: Call, link: _Link) -> list[Any]:
        """Return the answers of all other servers; that of one that does not respond in time is left out."""
        others = [other for other in self._links if other is not link]
        asked = [asyncio.create_task(other.calls.make(other.send, call.method, call.arguments)) for other in others]
        if asked:
            await asyncio.wait(asked, timeout=ANSWER_S)
        for each in asked:
            each.cancel()
        return [each.result() for each in asked if each.done()]

    # ---- from the cores ----

    async def _process(self, number: int, step: StepOutputs) -> None:
        outputs: dict[_Link, list[EngineCoreOutput]] = {}
        for output in step.outputs:
            entry = self._open.get(output.request_id)
            if entry is None:
                continue  # its server has ended it
            outputs.setdefault(entry.link, []).append(output)
            if output.finished:
                self._forget(output.request_id)
            else:
                entry.take(output)
        now = time.monotonic()
        message = self._about(number)
        message.state = message.state._replace(stats=step.stats)
        for link in self._links:
            its = outputs.get(link, [])
            # a message without outputs is the last one before the core rests
            if its or not step.outputs or now - link.sent_at > STATS_INTERVAL_S:
                link.send(msgspec.structs.replace(message, outputs=its))
                link.sent_at = now

    def _about(self, number: int) -> ReplicaOutputs:
        """Return the message with the state of a replica, which may have been removed, without outputs."""
        state = next((each for each in self._replicas.states if each.number == number), None)
        if state is not None:
            return ReplicaOutputs(state, [])
        gone = ReplicaState(number, self._replicas.roles[number], "stopped", SchedulerStats(num_ready=0))
        return ReplicaOutputs(gone, [], is_removed=True)

    def _to_resume(self, request_id: str) -> EngineCoreRequest | None:
        entry = self._open.get(request_id)
        return None if entry is None else entry.to_resume()
