"""The server's end of the helper processes: who works on what, and what happens when one of them ends."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final

import msgspec

from octavo.engine import frames
from octavo.server.errors import ApiError
from octavo.server.text_process import SLICE_CPU_S, Begun, Done, FromWorker, Job, Refused, TextSetup

SHORT_JOB_BYTES: Final = 256 << 10
"""Bodies up to this size have a worker of their own, which no longer one keeps busy."""

MAX_WAITING_BYTES: Final = 256 << 20
"""Bytes of bodies that are with the workers or wait for them; more are refused. --max-bodies-size allows as much by
default, and one sender half of it, which leaves room for others."""

SILENCE_S: Final = 4 * SLICE_CPU_S
"""Seconds after which a worker that has jobs and sends nothing is ended. Each slice begins with a message; where the
machine is busy, it takes longer than its processor time."""

_MOST_TRIES: Final = 3
_FROM_OUTSIDE: Final = frozenset({signal.SIGKILL, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT})
"""Signals that no limit of ours sends and no library raises: the system, out of memory, or an operator sent them."""

_log = logging.getLogger(__name__)


@dataclass(eq=False)
class _Task:
    """A job that somebody waits for."""

    job_id: int
    kind: str
    pieces: Sequence[bytes]
    result: asyncio.Future[bytes]
    num_tries: int = 0

    @cached_property
    def num_bytes(self) -> int:
        return sum(map(len, self.pieces))


@dataclass(eq=False)
class _Lane:
    """A worker: its connection while it runs, the jobs that it has, and the one that it works on."""

    mark: bytes
    wanted: asyncio.Event = field(default_factory=asyncio.Event)
    runner: asyncio.Task[None] | None = None
    writer: asyncio.StreamWriter | None = None
    tasks: dict[int, _Task] = field(default_factory=dict)
    current: int | None = None
    deadline: asyncio.Timeout | None = None

    def expect_message(self, silence_s: float) -> None:
        """Let the worker be silent for this time from now on where it has jobs, else without end."""
        if self.deadline is not None and not self.deadline.expired():
            self.deadline.reschedule(asyncio.get_running_loop().time() + silence_s if self.tasks else None)


class TextPool:
    """Two worker processes for work on text, one for short jobs and one for long ones. Started by the first job.

    One event loop, with whose end the processes end.
    """

    def __init__(self, setup: TextSetup, *, silence_s: float = SILENCE_S) -> None:
        self._setup = setup
        self._silence_s = silence_s
        self._short, self._long = _Lane(b"s"), _Lane(b"l")
        self._ids = itertools.count()
        self._decoder = msgspec.msgpack.Decoder(FromWorker)
        self._control: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None

    async def run(self, kind: str, pieces: Sequence[bytes]) -> bytes:
        """The result of `text_process.prepare` for a body of this kind, which comes in pieces. Raises ApiError."""
        task = _Task(next(self._ids), kind, pieces, asyncio.get_running_loop().create_future())
        waiting = sum(other.num_bytes for lane in (self._short, self._long) for other in lane.tasks.values())
        if waiting and waiting + task.num_bytes > MAX_WAITING_BYTES:
            raise _busy(f"requests with {waiting:,} bytes wait to be read")
        lane = self._short if task.num_bytes <= SHORT_JOB_BYTES else self._long
        lane.tasks[task.job_id] = task
        if len(lane.tasks) == 1:
            lane.expect_message(self._silence_s)
        lane.wanted.set()
        if lane.runner is None:
            lane.runner = asyncio.create_task(self._serve(lane), name="octavo-text")
        elif lane.writer is not None:
            _hand_over(task, lane.writer)
        try:
            return await task.result
        finally:
            del lane.tasks[task.job_id]
            if not lane.tasks:
                lane.expect_message(self._silence_s)
            if task.result.cancelled() and lane.writer is not None:
                _write(lane.writer, Job(task.job_id, ""), 0, ())

    async def _serve(self, lane: _Lane) -> None:
        """Keep a worker for the lane while there are jobs, whatever becomes of its processes."""
        try:
            while True:
                await lane.wanted.wait()
                lane.wanted.clear()
                ended_by: int | None = None
                try:
                    await self._serve_one_worker(lane)
                    ended_by = await self._signal_of_end(lane)
                except TimeoutError:
                    _log.warning("a helper process sent nothing for %g s and is ended", self._silence_s)
                    self._settle(lane, None)
                    self._end_process()
                except OSError as error:
                    _log.warning("a helper process could not be reached: %s", error)
                lane.writer = None
                self._settle(lane, ended_by)
        finally:
            if lane.writer is not None:
                lane.writer.close()
            self._end_process()

    async def _serve_one_worker(self, lane: _Lane) -> None:
        """Give a new worker all jobs of the lane, and take its results until it ends. Raises TimeoutError when it is
        silent for too long."""
        for task in lane.tasks.values():
            task.num_tries += 1
        reader, lane.writer = await self._fork(lane.mark)
        for task in list(lane.tasks.values()):
            _hand_over(task, lane.writer)
        try:
            async with asyncio.timeout(self._silence_s) as lane.deadline:
                while (body := await frames.read_async(reader)) is not None:
                    lane.expect_message(self._silence_s)
                    _take(lane, self._decoder.decode(body))
        finally:
            lane.deadline = None
            lane.writer.close()

    async def _signal_of_end(self, lane: _Lane) -> int | None:
        """The signal that ended the lane's worker, 0 for none, None when its parent has ended too."""
        if self._control is None:
            return None
        ours, theirs = socket.socketpair()
        with ours:
            ours.setblocking(False)
            with theirs:
                socket.send_fds(self._control, [lane.mark.upper()], [theirs.fileno()])
            async with asyncio.timeout(self._silence_s):
                answer = await asyncio.get_running_loop().sock_recv(ours, 1)
        return answer[0] if answer else None

    def _settle(self, lane: _Lane, ended_by: int | None) -> None:
        """A worker has ended: the job that it worked on is refused, the others get a new one."""
        current, lane.current = lane.current, None
        for task in lane.tasks.values():
            if task.result.done():
                continue
            if task.job_id == current:
                task.result.set_exception(_refusal_of_current(ended_by))
            elif task.num_tries >= _MOST_TRIES:
                task.result.set_exception(_busy("the processes that read requests do not start"))
            else:
                lane.wanted.set()

    async def _fork(self, mark: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Return the connection to a new worker. What is written to it waits until it has started."""
        if self._process is None or self._process.poll() is not None:
            self._end_process()
            self._start_process()
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

    def _start_process(self) -> None:
        self._control, theirs = socket.socketpair()
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "octavo.server.text_process", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                process_group=0,
            )
        finally:
            theirs.close()
        self._control.sendall(frames.pack(self._setup))

    def _end_process(self) -> None:
        """End the process and its workers. What they worked on gets new ones."""
        for lane in (self._short, self._long):
            lane.current = None
        if self._control is not None:
            self._control.close()
        if self._process is not None:
            with suppress(ProcessLookupError, PermissionError):  # none is left
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._control = self._process = None


def _take(lane: _Lane, message: FromWorker) -> None:
    """Note what a worker reports."""
    if isinstance(message, Begun):
        lane.current = message.job_id
        return
    lane.current = None
    task = lane.tasks.get(message.job_id)
    if task is None or task.result.done():
        return
    if isinstance(message, Done):
        task.result.set_result(message.value)
    else:
        task.result.set_exception(_error_of(message))


def _refusal_of_current(ended_by: int | None) -> ApiError:
    """The error of the job that a worker was ended at, by a signal, 0 for none, or None when that is not known."""
    if ended_by is None or ended_by in _FROM_OUTSIDE:
        return _busy(
            "the process that read the request did not respond, or was ended from outside, as the system does when it "
            "has no memory left"
        )
    return ApiError(
        400,
        "the request takes more processor time or memory to read, render or tokenise than one may; send less text",
        code="request_too_expensive",
    )


def _hand_over(task: _Task, writer: asyncio.StreamWriter) -> None:
    if not task.result.done():
        _write(writer, Job(task.job_id, task.kind), task.num_bytes, task.pieces)


def _write(writer: asyncio.StreamWriter, job: Job, num_bytes: int, pieces: Sequence[bytes]) -> None:
    """Write a job without joining its body, which would take long for a large one."""
    writer.write(frames.pack(job) + frames.head(num_bytes))
    for piece in pieces:
        writer.write(piece)


def _error_of(refused: Refused) -> ApiError:
    return ApiError(refused.status, refused.message, param=refused.param, code=refused.code)


def _busy(reason: str) -> ApiError:
    return ApiError(503, f"{reason}; send it again later", code="server_busy", headers={"Retry-After": "1"})
