"""The server's end of the helper processes: who works on what, and what happens when one of them ends."""

from __future__ import annotations

import asyncio
import itertools
import logging
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final

import msgspec

from octavo.engine import frames
from octavo.server.errors import ApiError
from octavo.server.text_process import Begun, Done, FromWorker, Job, Refused, TextSetup

SHORT_JOB_BYTES: Final = 256 << 10
"""Bodies up to this size have a worker of their own, which no longer one keeps busy."""

MAX_WAITING_BYTES: Final = 256 << 20
"""Bytes of bodies that are with the workers or wait for them; more are refused. --max-bodies-size allows as much by
default, and one sender half of it, which leaves room for others."""

_MOST_TRIES: Final = 3

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


class TextPool:
    """Two worker processes for work on text, one for short jobs and one for long ones. Started by the first job.

    One event loop, with whose end the processes end.
    """

    def __init__(self, setup: TextSetup) -> None:
        self._setup = setup
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
        lane.wanted.set()
        if lane.runner is None:
            lane.runner = asyncio.create_task(self._serve(lane), name="octavo-text")
        elif lane.writer is not None:
            _hand_over(task, lane.writer)
        try:
            return await task.result
        finally:
            del lane.tasks[task.job_id]
            if task.result.cancelled() and lane.writer is not None:
                _write(lane.writer, Job(task.job_id, ""), 0, ())

    async def _serve(self, lane: _Lane) -> None:
        """Keep a worker for the lane while there are jobs, whatever becomes of its processes."""
        try:
            while True:
                await lane.wanted.wait()
                lane.wanted.clear()
                try:
                    await self._serve_one_worker(lane)
                except OSError as error:
                    _log.warning("a helper process could not be reached: %s", error)
                lane.writer = None
                self._settle(lane)
        finally:
            if lane.writer is not None:
                lane.writer.close()
            self._end_process()

    async def _serve_one_worker(self, lane: _Lane) -> None:
        """Give a new worker all jobs of the lane, and take its results until it ends."""
        for task in lane.tasks.values():
            task.num_tries += 1
        reader, lane.writer = await self._fork(lane.mark)
        for task in list(lane.tasks.values()):
            _hand_over(task, lane.writer)
        while (body := await frames.read_async(reader)) is not None:
            message = self._decoder.decode(body)
            if isinstance(message, Begun):
                lane.current = message.job_id
                continue
            lane.current = None
            waiting = lane.tasks.get(message.job_id)
            if waiting is None or waiting.result.done():
                continue
            if isinstance(message, Done):
                waiting.result.set_result(message.value)
            else:
                waiting.result.set_exception(_error_of(message))
        lane.writer.close()

    def _settle(self, lane: _Lane) -> None:
        """A worker has ended: the job that it worked on is refused, the others get a new one."""
        current, lane.current = lane.current, None
        for task in lane.tasks.values():
            if task.result.done():
                continue
            if task.job_id == current:
                task.result.set_exception(
                    ApiError(
                        400,
                        "the request takes more processor time or memory to read, render or tokenise than one may; "
                        "send less text",
                        code="request_too_expensive",
                    )
                )
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
        if self._control is not None:
            self._control.close()
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self._control = self._process = None


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
