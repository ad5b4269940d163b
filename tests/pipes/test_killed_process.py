"""The other end of a pipe is a process that is killed while it sends and receives."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest
import torch

from octavo.errors import PipeError
from octavo.pipes.pipe import Listener, Pipe, connect
from tests.pipes.ends import SECRET, Running, fresh_address

CHILD = """
import sys, threading, torch
from octavo.pipes.pipe import connect
for address in sys.argv[1:]:
    pipe = connect(address, bytes.fromhex(sys.stdin.readline()))
    def send(pipe=pipe):
        while True:
            pipe.send_tensor(torch.ones(1_000_000), b"more")
    threading.Thread(target=send).start()
"""


def read_until_the_end(pipe: Pipe) -> None:
    while True:
        assert pipe.recv_tensor()[1] == b"more"


def test_both_directions_end_when_the_process_is_killed_and_another_takes_its_place() -> None:
    listeners = [Listener(fresh_address(scheme), SECRET) for scheme in ("tcp", "unix", "shm")]
    command = [sys.executable, "-c", CHILD, *(listener.address for listener in listeners)]
    child = subprocess.Popen(command, stdin=subprocess.PIPE)
    assert child.stdin is not None
    child.stdin.write((SECRET.hex().encode() + b"\n") * len(listeners))
    child.stdin.close()
    pipes = [listener.accept(wait_s=200) for listener in listeners]
    for pipe in pipes:
        received, header = pipe.recv_tensor()
        assert received is not None
        assert (received.sum().item(), header) == (1_000_000, b"more")
    waiting = [Running(lambda pipe=pipe: pipe.send_tensor(torch.ones(32 << 20))) for pipe in pipes]  # type: ignore[misc]
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    for pipe, send in zip(pipes, waiting, strict=True):
        with pytest.raises(PipeError, match="cut|the other end"):
            read_until_the_end(pipe)
        with pytest.raises(PipeError):
            send.result()
        pipe.close()
    for listener in listeners:
        near = connect(listener.address, SECRET)
        far = listener.accept(wait_s=200)
        near.send_tensor(None, b"again")
        assert far.recv_tensor() == (None, b"again")
        for each in (near, far, listener):
            each.close()
