"""Processes that decode, render and tokenise for the server: `python -m octavo.server.text_process FD`.

The first process loads the tokenizer and then only forks workers, which share its memory, one for each socket that it
receives. A worker does one job after the other. A signal ends a worker whose job takes too much processor time or gets
no memory, or whose socket is closed meanwhile; the socket's other end receives which signal it was.
"""

from __future__ import annotations

import fcntl
import os
import resource
import select
import signal
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from pkgutil import resolve_name
from typing import Final

import msgspec

from octavo.core.process import frames
from octavo.engine.input.input_processor import InputProcessor, open_tokenizer
from octavo.multimodal.media_urls import MustReadElsewhere
from octavo.server.decode import decode
from octavo.server.errors import as_api_error
from octavo.server.preparing import Preparer, TextSetup, prepared
from octavo.server.schema.bodies import TokensBody
from octavo.server.speech.sounds import HEAR, hear

JOB_CPU_S: Final = 30.0
"""Seconds of processor time that one job may take."""

SHORT_JOB_CPU_S: Final = 0.2
"""Seconds of processor time for a job in the worker for short jobs, where others wait behind it; a longer job is ended,
and begins again in a worker for long jobs."""
SHORT_TURN_S: Final = 0.05
"""Seconds of processor time after which a short job with many prompts moves to a worker for long jobs by itself."""

WORKER_MEMORY: Final = 3 << 29
"""Bytes that a worker may use beyond what it starts with: an image of the most pixels, of which the settings of
Qwen3-VL leave 16.8 million, takes 1.3 GiB."""

SHORT_JOBS: Final = b"s"
LONG_JOBS: Final = b"l"
FETCHES: Final = b"f"
"""The byte sent with a worker's socket states its kind: short jobs, long jobs, or jobs that wait for other hosts."""

_LONG_JOBS_NICENESS: Final = 10


class Done(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The result of a job."""

    value: bytes


class Failed(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A job ended with an error, which the server returns."""

    status: int
    message: str
    param: str | None
    code: str | None


class Ended(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The worker was ended by this signal, 0 for none."""

    signal: int


class Elsewhere(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The job belongs to workers of another kind, whose byte this is."""

    mark: bytes


FromWorker = Done | Failed | Ended | Elsewhere


def work(connection: socket.socket, do: Callable[[str, bytes], bytes], job_cpu_s: float) -> None:
    """Do the jobs that come over a socket, as a frame with the kind and a frame with the body, until it is closed."""
    fcntl.fcntl(connection, fcntl.F_SETOWN, os.getpid())
    while (kind := frames.read(connection)) is not None and (body := frames.read(connection)) is not None:
        _end_when_closed(connection, True)
        signal.setitimer(signal.ITIMER_PROF, job_cpu_s)  # SIGIO then ends the process, even inside a library
        result = _result(do, kind.decode(), body)
        signal.setitimer(signal.ITIMER_PROF, 0)
        _end_when_closed(connection, False)
        connection.sendall(frames.pack(result))


def _end_when_closed(connection: socket.socket, is_on: bool) -> None:
    """Let the system end this process with SIGIO as soon as the other end of the connection is closed."""
    flags = fcntl.fcntl(connection, fcntl.F_GETFL) & ~os.O_ASYNC
    fcntl.fcntl(connection, fcntl.F_SETFL, flags | os.O_ASYNC if is_on else flags)
    if is_on and select.select([connection], [], [], 0)[0]:
        sys.exit()  # it was closed before


def _result(do: Callable[[str, bytes], bytes], kind: str, body: bytes) -> FromWorker:
    try:
        return Done(do(kind, body))
    except MustReadElsewhere as error:
        return Elsewhere(FETCHES if error.fetches else LONG_JOBS)
    except MemoryError:
        return Failed(400, "the request needs too much memory; send less", None, "request_too_large")
    except Exception as error:
        refusal = as_api_error(error)
        return Failed(refusal.status, str(refusal), refusal.param, refusal.code)


def _serve(connection: socket.socket, setup: TextSetup, tools: InputProcessor, mark: bytes) -> None:
    """Fork a worker for a connection, and send the signal that ended it."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    preparer = Preparer(tools, setup.policy, most_s=SHORT_TURN_S if mark == SHORT_JOBS else None)
    # an image of a few kilobytes may take one second, a sound fifteen: too long for short jobs to wait
    tools.media.urls.reads_images, tools.media.urls.waits_for_hosts = mark != SHORT_JOBS, mark == FETCHES

    def do(kind: str, body: bytes) -> bytes:
        if kind.startswith(HEAR):
            if mark == SHORT_JOBS:
                raise MustReadElsewhere(fetches=False)
            return hear(kind.removeprefix(HEAR), body, setup.input.model, tools)
        asked = decode(body, resolve_name(kind))
        if isinstance(asked, TokensBody):
            return msgspec.msgpack.encode(preparer.response(asked))
        return prepared(asked, asked.prompts(preparer), preparer)

    if (process := os.fork()) == 0:
        _limit_memory()
        if mark != SHORT_JOBS:
            os.nice(_LONG_JOBS_NICENESS)  # long jobs must not slow the model down
        with suppress(BrokenPipeError, ConnectionResetError):  # the server has closed the connection
            work(connection, do, SHORT_JOB_CPU_S if mark == SHORT_JOBS else JOB_CPU_S)
        return
    _, status = os.waitpid(process, 0)
    with suppress(BrokenPipeError, ConnectionResetError):
        connection.sendall(frames.pack(Ended(os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0)))


def _limit_memory() -> None:
    """Limit this process's memory, where the system reports how much it has."""
    statm = Path("/proc/self/statm")
    if statm.is_file():
        now = int(statm.read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (now + WORKER_MEMORY, now + WORKER_MEMORY))


def main() -> int:
    """Load, then fork for each socket that comes, until the server closes the connection or ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the system forgets children that have ended
    with socket.socket(fileno=int(sys.argv[1])) as control:
        setup = frames.read_as(control, TextSetup)
        if setup is None:
            return 0
        tokenizer, template = open_tokenizer(setup.input.model)
        tokenizer.releases_lock = False  # nothing else runs here, and its threads cost memory
        tools = InputProcessor(setup.input, tokenizer=tokenizer, chat_template=template)
        tools.media.warm_up()
        if template is not None:
            template.compile()  # once, and not in each worker
        while True:
            word, descriptors, _, _ = socket.recv_fds(control, 1, 1)
            if not word:
                break
            with socket.socket(fileno=descriptors[0]) as connection:
                if os.fork() == 0:
                    control.close()
                    _serve(connection, setup, tools, word)
                    return 0
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    return 0


if __name__ == "__main__":
    sys.exit(main())
