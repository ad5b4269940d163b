"""Forks get the descriptors of the process that asks for them, and one that does not answer is an error."""

from __future__ import annotations

import os
import select
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fakes import warm_processes
from tests.fakes.warm_processes import SERVER, WarmProcesses, renumber

ROOT = Path(__file__).parents[1]
CHILD = """
import os, signal
from tests.fakes.warm_processes import end_with_parent
parent = os.getpid()
if os.fork() == 0:
    end_with_parent(parent)
    os.write(1, b"x")
signal.pause()
"""


def test_descriptors_get_numbers_that_others_would_pass_through() -> None:
    ends = [os.pipe() for _ in range(3)]
    numbers = [302, 301, 300]
    expected = [os.fstat(read).st_ino for read, _ in ends]
    renumber([read for read, _ in ends], numbers)
    try:
        assert [os.fstat(number).st_ino for number in numbers] == expected
    finally:
        for each in (*numbers, *(write for _, write in ends)):
            os.close(each)


def test_a_source_that_does_not_answer_hangs_no_test(monkeypatch: pytest.MonkeyPatch) -> None:
    silent = WarmProcesses()
    monkeypatch.setattr(warm_processes, "_ANSWER_S", 0.05)
    made: list[socket.socket] = []

    def popen(*_: object, pass_fds: list[int], **__: object) -> None:
        made.append(socket.socket(fileno=os.dup(pass_fds[0])))

    monkeypatch.setattr(warm_processes.subprocess, "Popen", popen)
    with pytest.raises(TimeoutError):
        silent.spawn("octavo.engine.cores.core_process")
    made[0].close()


class Interrupted(socket.socket):
    """A socket at whose answers the user interrupts the tests."""

    def recv(self, *_: object) -> bytes:
        raise KeyboardInterrupt


def test_an_answer_that_nobody_waits_for_is_none_to_the_next_request() -> None:
    ours, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
    with theirs:
        theirs.setblocking(False)
        with pytest.raises(KeyboardInterrupt):
            WarmProcesses(Interrupted(fileno=ours.detach())).fork([SERVER], [], [])
        assert SERVER in theirs.recv(10_000).decode()
        assert theirs.recv(1) == b"", "the source ends"


def test_a_server_ends_with_the_tests_that_were_killed() -> None:
    with subprocess.Popen([sys.executable, "-c", CHILD], stdout=subprocess.PIPE, cwd=ROOT) as tests:
        assert tests.stdout is not None
        assert os.read(tests.stdout.fileno(), 1) == b"x"
        tests.kill()
        assert select.select([tests.stdout], [], [], 100)[0]
        assert os.read(tests.stdout.fileno(), 1) == b""


def test_forks_have_imported_with_the_environment_before_the_first_test(monkeypatch: pytest.MonkeyPatch) -> None:
    source = WarmProcesses()
    monkeypatch.setenv("HF_HUB_OFFLINE", "of a test")
    given: list[dict[str, str]] = []
    monkeypatch.setattr(warm_processes.subprocess, "Popen", lambda *_, env, **__: given.append(env))
    source._start().close()
    assert given[0].get("HF_HUB_OFFLINE") != "of a test"
