"""The server's side of the helper processes: assigns jobs to workers and handles the end of a process."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final
from weakref import WeakValueDictionary

import msgspec

from octavo.core.process import frames, processes
from octavo.server.errors import ApiError
from octavo.server.preparing import TextSetup
from octavo.server.text_process import (
    FETCHES,
    JOB_CPU_S,
    LONG_JOBS,
    SHORT_JOBS,
    Done,
    Elsewhere,
    Ended,
    Failed,
    FromWorker,
)

SHORT_JOB_BYTES: Final = 256 << 10
"""Bodies up to this size have a worker of their own, where a job may take at most `SHORT_JOB_CPU_S`."""

SILENCE_S: Final = 4 * JOB_CPU_S
"""Seconds after which a worker that has sent no result is ended. On a busy machine a job takes longer than its
processor time."""

_MOST_WORKERS: Final = {SHORT_JOBS: 1, LONG_JOBS: 2, FETCHES: 8}
_MOST_TRIES: Final = 3
_FROM_OUTSIDE: Final = frozenset({signal.SIGKILL, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT})
"""Signals that none of our limits sends and no library raises: they come from the system, out of memory, or an
operator."""

_log = logging.getLogger(__name__)


@dataclass(eq=False)
class _Lane:
    """Workers for jobs of one kind: the connections of idle ones, and the most jobs at once."""

    mark: bytes
    free: asyncio.Semaphore
    idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = field(default_factory=list)
    turns: WeakValueDictionary[str, asyncio.Lock] = field(default_factory=WeakValueDictionary)


class TextPool:
    """Worker processes for work on text: one for short jobs, two for long ones, eight for jobs that wait for other
    hosts. The first job of a kind starts its workers. A short body that takes long becomes a long job.

    A sender has at most one running job in a lane, so that senders take turns. The processes end
    with the event loop that they were started on.
    """

    def __init__(self, setup: TextSetup, *, starts_now: bool = False, silence_s: float = SILENCE_S) -> None:
        """starts_now: the first job does not wait for imports; an event loop must run."""
        self._setup = setup
        self._silence_s = silence_s
        self._lanes = {mark: _Lane(mark, asyncio.Semaphore(most)) for mark, most in _MOST_WORKERS.items()}
        self._decoder = msgspec.msgpack.Decoder(FromWorker)
        self._keeper: asyncio.Task[None] | None = None
        self._control: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        if starts_now:
            self._start_unless_running()

    async def run(self, kind: str, pieces: Sequence[bytes], sender: str = "") -> bytes:
        """Return the result for a body of this kind, which comes in pieces. Raises ApiError."""
        message: FromWorker = Elsewhere(SHORT_JOBS if sum(map(len, pieces)) <= SHORT_JOB_BYTES else LONG_JOBS)
        while isinstance(message, Elsewhere):
            mark = message.mark
            message = await self._in_turn(self._lanes[mark], kind, pieces, sender)
            if mark == SHORT_JOBS and isinstance(message, Ended) and message.signal == signal.SIGPROF:
                message = Elsewhere(LONG_JOBS)  # it took more time than other short jobs may wait
        if isinstance(message, Done):
            return message.value
        raise _error_of(message)

    async def _in_turn(self, lane: _Lane, kind: str, pieces: Sequence[bytes], sender: str) -> FromWorker:
        """Return what a worker of a lane sends about a job, as soon as it is the sender's turn."""
        turn = lane.turns.setdefault(sender, asyncio.Lock())
        async with turn, lane.free:
            return await self._message(lane, kind, pieces)

    async def _message(self, lane: _Lane, kind: str, pieces: Sequence[bytes]) -> FromWorker:
        """Return what a worker sends about a job. Raises ApiError when no worker works on it."""
        name = kind.encode()
        head = frames.head(len(name)) + name + frames.head(sum(map(len, pieces)))
        for _ in range(_MOST_TRIES):
            try:
                async with asyncio.timeout(self._silence_s):
                    message = await self._exchange(lane, head, pieces)
            except TimeoutError:
                _log.warning("a helper process sent nothing for %g s and is ended", self._silence_s)
                return Ended(signal.SIGKILL)
            except OSError as error:
                _log.warning("a helper process could not be reached: %s", error)
                continue
            if message is not None:
                return message
        raise _busy("the processes that read requests do not start")

    async def _exchange(self, lane: _Lane, head: bytes, pieces: Sequence[bytes]) -> FromWorker | None:
        """Send a job to a worker and return what it sends; None when it has ended before.

        Unless the worker has sent a result, the connection is closed, which ends the worker.
        """
        reader, writer = lane.idle.pop() if lane.idle else await self._fork(lane.mark)
        message: FromWorker | None = None
        try:
            writer.write(head)
            for piece in pieces:  # not joined, which would take long for a large body
                writer.write(piece)
            body = await frames.read_async(reader)
            message = None if body is None else self._decoder.decode(body)
        finally:
            if message is None or isinstance(message, Ended):
                writer.transport.abort()
            else:
                lane.idle.append((reader, writer))
        return message

    async def _fork(self, mark: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Return the connection to a new worker. What is written to it waits until it has started."""
        self._start_unless_running()
        assert self._control is not None
        ours, theirs = socket.socketpair()
        try:
            socket.send_fds(self._control, [mark], [theirs.fileno()])
            return await asyncio.open_connection(sock=ours, limit=1 << 20)
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()

    def _start_unless_running(self) -> None:
        if self._process is not None and self._process.poll() is None:
            return
        self._end_process()
        if self._keeper is None:
            self._keeper = asyncio.create_task(self._end_with_loop(), name="octavo-text")
        self._control, self._process = processes.spawn("octavo.server.text_process")
        self._control.sendall(frames.pack(self._setup))

    async def _end_with_loop(self) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            self._end_process()

    def _end_process(self) -> None:
        """End the process and its workers. New ones get the jobs that they had."""
        for lane in self._lanes.values():
            for _, writer in lane.idle:
                writer.transport.abort()
            lane.idle.clear()
        if self._control is not None:
            self._control.close()
        if self._process is not None:
            with suppress(ProcessLookupError, PermissionError):  # none is left
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._control = self._process = None


def _error_of(message: Failed | Ended) -> ApiError:
    """Return the error of a job that was refused, or whose worker a signal ended."""
    if isinstance(message, Failed):
        return ApiError(message.status, message.message, param=message.param, code=message.code)
    if message.signal in _FROM_OUTSIDE:
        return _busy(
            "the process that read the request did not respond, or was ended from outside, as the system does when it "
            "has no memory left"
        )
    return ApiError(
        400,
        "the request takes more processor time or memory to read, render or tokenise than one may; send less text",
        code="request_too_expensive",
    )


def _busy(reason: str) -> ApiError:
    return ApiError(503, f"{reason}; send it again later", code="server_busy", headers={"Retry-After": "1"})
