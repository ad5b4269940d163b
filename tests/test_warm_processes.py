"""Forks get the descriptors of the process that asks for them, and one that does not answer is an error."""

from __future__ import annotations

import os
import socket

import pytest

from tests.fakes import warm_processes
from tests.fakes.warm_processes import WarmProcesses, renumber


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
        silent.spawn("octavo.engine.core_process")
    made[0].close()
