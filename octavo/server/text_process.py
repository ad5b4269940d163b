"""Processes that decode, render and tokenise for the server: `python -m octavo.server.text_process FD`.

The first one loads the tokenizer and then only forks workers, which share its memory, one for each socket that it is
sent. A worker takes the slices of its jobs in turns, so that a long job holds up no short one. A slice that takes too
much processor time ends the worker; so does a library that gets no memory. The server starts another one.
"""

from __future__ import annotations

import os
import resource
import select
import signal
import socket
import sys
import traceback
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import msgspec

from octavo.core.prompt import Prompt
from octavo.engine import frames
from octavo.engine.input_processor import InputProcessor, InputSetup, open_tokenizer
from octavo.errors import InvalidRequest, OctavoError
from octavo.server.decode import RequestBody, decode
from octavo.server.errors import as_api_error
from octavo.server.preparation import (
    REQUESTS,
    TOKENS_OF_SLICE,
    Preparer,
    Sliced,
    TextPolicy,
    without_text,
)
from octavo.server.schema import DetokenizeRequest, TokenizeRequest

SLICE_CPU_S: Final = 30.0
"""Processor time that one slice of a job may take."""

WORKER_MEMORY: Final = 1 << 30
"""Bytes that a worker may use beyond what it starts with."""

_MOST_BYTES_STARTED: Final = 32 << 20
_LONG_JOBS_NICENESS: Final = 10


class TextSetup(msgspec.Struct, frozen=True):
    """What the processes need to know."""

    input: InputSetup
    model_names: tuple[str, ...]
    policy: TextPolicy


class Job(msgspec.Struct, frozen=True, array_like=True):
    """What comes before the frame with a job's body. An empty `kind` cancels the job."""

    job_id: int
    kind: str


class Begun(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A slice of this job is worked on now."""

    job_id: int


class Done(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The result of a job."""

    job_id: int
    value: bytes


class Refused(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A job ended with an error, as an answer of the server."""

    job_id: int
    status: int
    message: str
    param: str | None
    code: str | None


class PreparedPrompt(msgspec.Struct, frozen=True, array_like=True):
    """A prompt of the result of a job. token_ids: 4 bytes each, in the byte order of the machine."""

    text: str | None
    token_ids: bytes


class Prepared(msgspec.Struct, frozen=True, array_like=True):
    """The result of a job that makes prompts: the request without its text, and the prompts."""

    asked: msgspec.Raw
    prompts: list[PreparedPrompt]


FromWorker = Begun | Done | Refused


def prepare(preparer: Preparer, tools: InputProcessor, kind: str, body: bytes) -> Sliced[bytes]:
    """The result of a job, with a yield between its slices. Raises what is wrong with the request."""
    asked = decode(body, REQUESTS[kind])
    del body
    yield
    if isinstance(asked, DetokenizeRequest):
        return preparer.detokenized(asked)
    prompts = preparer.prompts(asked)
    yield
    if isinstance(asked, TokenizeRequest):
        return (yield from preparer.tokenized(asked, prompts[0]))
    return (yield from _tokenised(tools, asked, prompts))


def _tokenised(tools: InputProcessor, asked: RequestBody, prompts: list[Prompt]) -> Sliced[bytes]:
    import numpy as np

    keeps_text = bool(getattr(asked, "echo", None))
    has_messages = getattr(asked, "messages", None) is not None
    done: list[PreparedPrompt] = []
    num_tokens = 0
    for prompt in prompts:
        try:
            token_ids = tools.tokenised(prompt)
        except InvalidRequest as error:
            error.field = "messages" if has_messages else "prompt"
            raise
        done.append(PreparedPrompt(prompt.text if keeps_text else None, np.array(token_ids, np.int32).tobytes()))
        num_tokens += len(token_ids)
        if num_tokens > TOKENS_OF_SLICE:
            num_tokens = 0
            yield
    return frames.encode(Prepared(msgspec.Raw(frames.encode(without_text(asked))), done))


class Worker:
    """Does the jobs that come over a socket, a slice of each in turn, until the socket is closed."""

    def __init__(self, connection: socket.socket, start: Callable[[str, bytes], Sliced[bytes]]) -> None:
        self._connection = connection
        self._start = start
        self._decoder = msgspec.msgpack.Decoder(Job)
        self._waiting: deque[tuple[int, str, bytes]] = deque()
        self._active: deque[tuple[int, int, Sliced[bytes]]] = deque()  # id, bytes of the body, slices

    def run(self) -> None:
        """Serve until the other end is closed."""
        while self._read_jobs():
            self._begin_jobs()
            if self._active:
                self._work()

    def _read_jobs(self) -> bool:
        """Take in what has come, or wait for it where nothing is to do; False when the connection is closed."""
        while True:
            is_idle = not self._active and not self._waiting
            if not is_idle and sum(len(body) for _, _, body in self._waiting) > _MOST_BYTES_STARTED:
                return True
            readable, _, _ = select.select([self._connection], [], [], None if is_idle else 0)
            if not readable:
                return True
            head, body = frames.read(self._connection), frames.read(self._connection)
            if head is None or body is None:
                return False
            job = self._decoder.decode(head)
            if job.kind:
                self._waiting.append((job.job_id, job.kind, body))
            else:
                self._waiting = deque(each for each in self._waiting if each[0] != job.job_id)
                self._active = deque(each for each in self._active if each[0] != job.job_id)

    def _begin_jobs(self) -> None:
        started = sum(size for _, size, _ in self._active)
        while self._waiting and (not self._active or started + len(self._waiting[0][2]) <= _MOST_BYTES_STARTED):
            job_id, kind, body = self._waiting.popleft()
            started += len(body)
            self._active.append((job_id, len(body), self._start(kind, body)))

    def _work(self) -> None:
        """Do one slice of the next job."""
        job_id, size, slices = self._active.popleft()
        self._send(Begun(job_id))
        signal.setitimer(signal.ITIMER_PROF, SLICE_CPU_S)  # its signal ends the process, also inside a library
        try:
            next(slices)
            self._active.append((job_id, size, slices))
        except StopIteration as end:
            self._send(Done(job_id, end.value))
        except MemoryError:
            self._send(Refused(job_id, 400, "the request needs too much memory; send less", None, "request_too_large"))
        except OctavoError as error:
            self._refuse(job_id, error)
        except Exception as error:
            traceback.print_exc()
            self._refuse(job_id, error)
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)

    def _refuse(self, job_id: int, error: Exception) -> None:
        answer = as_api_error(error)
        self._send(Refused(job_id, answer.status, str(answer), answer.param, answer.code))

    def _send(self, message: FromWorker) -> None:
        self._connection.sendall(frames.pack(message))


def _serve(connection: socket.socket, setup: TextSetup, tools: InputProcessor, *, is_long: bool) -> None:
    """What a forked worker does."""
    _limit_memory()
    if is_long:
        os.nice(_LONG_JOBS_NICENESS)  # long jobs take no processor from the model that others wait for
    preparer = Preparer(tools, setup.model_names, setup.policy)

    def start(kind: str, body: bytes) -> Sliced[Any]:
        return prepare(preparer, tools, kind, body)

    try:
        Worker(connection, start).run()
    except (BrokenPipeError, ConnectionResetError):
        return  # the server has gone


def _limit_memory() -> None:
    """Limit this process's memory, where the system reports how much it has."""
    statm = Path("/proc/self/statm")
    if statm.is_file():
        now = int(statm.read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (now + WORKER_MEMORY, now + WORKER_MEMORY))


def main() -> int:
    """Load, then fork a worker for each socket that comes, until the server closes the connection or ends.

    A word with the socket names the worker; in upper case it asks for the signal that ended that worker.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with socket.socket(fileno=int(sys.argv[1])) as control:
        body = frames.read(control)
        if body is None:
            return 0
        setup = msgspec.msgpack.decode(body, type=TextSetup)
        tokenizer, template = open_tokenizer(setup.input.model)
        tokenizer.releases_lock = False  # nothing else runs here, and its threads cost memory
        tools = InputProcessor(setup.input, tokenizer=tokenizer, chat_template=template)
        workers: dict[bytes, int] = {}
        while True:
            word, descriptors, _, _ = socket.recv_fds(control, 1, 1)
            if not word:
                break
            with socket.socket(fileno=descriptors[0]) as connection:
                if word.isupper():
                    _report_end(workers.pop(word.lower(), None), connection)
                elif (process := os.fork()) == 0:
                    control.close()
                    _serve(connection, setup, tools, is_long=word == b"l")
                    return 0
                else:
                    workers[word] = process
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)  # a worker would look at its connection after its slice alone
    return 0


def _report_end(process: int | None, connection: socket.socket) -> None:
    """Send the signal that ended a worker, 0 for none, as a byte; nothing when it is not known."""
    if process is None:
        return
    _, status = os.waitpid(process, 0)
    with suppress(BrokenPipeError):  # the server has gone
        connection.sendall(bytes([os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0]))


if __name__ == "__main__":
    sys.exit(main())
