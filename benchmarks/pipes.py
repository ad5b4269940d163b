"""Bandwidth of pipes between two processes, against memcpy and plain sockets: `python -m benchmarks.pipes`.

In every round each way carries the same tensors, one after the other, so that ratios compare the same moments of a
machine. A pipe allocates the tensors that it receives; the plain socket fills one buffer, and memcpy copies to one.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import secrets
import socket
import statistics
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection

import numpy as np
import torch

from octavo.cli.report import report
from octavo.pipes.pipe import connect, listen

AGAINST = {"shm": "memcpy", "tcp": "sendall", "unix": "sendall"}
"""What each pipe is compared with."""


def receive(kind: str, address: str, secret: bytes, num_bytes: int, counts: Connection) -> None:
    """Receive as many tensors as each count says, and confirm them, until a count is 0. Runs in a process."""
    torch.set_num_threads(1)
    if kind == "sendall":
        host, port = address.removeprefix("tcp://").split(":")
        connection = socket.create_connection((host, int(port)))
        buffer = memoryview(bytearray(num_bytes))

        def one() -> None:
            got = 0
            while got < num_bytes:
                got += connection.recv_into(buffer[got:])
    else:
        pipe = connect(address, secret)

        def one() -> None:
            pipe.recv_tensor()

    while count := counts.recv():
        for _ in range(count):
            one()
        counts.send(None)


class Way:
    """One way to another process: `send` returns the seconds until the other end has all tensors."""

    def __init__(self, kind: str, tensors: list[torch.Tensor]) -> None:
        secret = secrets.token_bytes(32)
        listener: socket.socket | None = None
        if kind == "sendall":
            listener = socket.create_server(("127.0.0.1", 0))
            address = f"tcp://127.0.0.1:{listener.getsockname()[1]}"
        else:
            path = f"{kind}://{tempfile.gettempdir()}/octavo-pipes-{os.getpid()}"
            waits = listen("tcp://127.0.0.1:0" if kind == "tcp" else path, secret)
            address = waits.address
        context = multiprocessing.get_context("spawn")
        self._counts, theirs = context.Pipe()
        self._process = context.Process(
            target=receive, args=[kind, address, secret, tensors[0].nbytes, theirs], daemon=True
        )
        self._process.start()
        self._send: Callable[[torch.Tensor], None]
        if listener is not None:
            connection, _ = listener.accept()
            listener.close()
            self._send = lambda tensor: connection.sendall(tensor.numpy().data)
            self._release = connection.close
        else:
            pipe = waits.accept()
            waits.close()
            self._send = pipe.send_tensor
            self._release = pipe.close
        self._tensors = tensors

    def send(self) -> float:
        began = time.perf_counter()
        self._counts.send(len(self._tensors))
        for tensor in self._tensors:
            self._send(tensor)
        self._counts.recv()
        return time.perf_counter() - began

    def close(self) -> None:
        self._counts.send(0)
        self._process.join()
        self._counts.close()
        self._release()


def measure(kinds: list[str], num_bytes: int, count: int, rounds: int) -> dict[str, float]:
    """Return the median GB/s of memcpy, of plain sockets and of each kind of pipe, and the medians of the ratios."""
    torch.set_num_threads(1)
    # more than the caches of a processor keep, as with the KV of a prompt
    tensors = [torch.randint(0, 256, (num_bytes,), dtype=torch.uint8) for _ in range(count)]
    targets = [np.zeros(num_bytes, np.uint8) for _ in range(count)]
    ways = {kind: Way(kind, tensors) for kind in ("sendall", *kinds)}

    def memcpy() -> float:
        began = time.perf_counter()
        for target, tensor in zip(targets, tensors, strict=True):
            np.copyto(target, tensor.numpy())
        return time.perf_counter() - began

    calls: dict[str, Callable[[], float]] = {"memcpy": memcpy, **{kind: way.send for kind, way in ways.items()}}
    seconds: dict[str, list[float]] = {kind: [] for kind in calls}
    for number in range(rounds + 1):
        for kind, call in calls.items():
            taken = call()
            if number:  # the first round touches memory for the first time
                seconds[kind].append(taken)
    for way in ways.values():
        way.close()
    found = {f"{kind}_gbs": num_bytes * count / statistics.median(each) / 1e9 for kind, each in seconds.items()}
    for kind in kinds:
        against = AGAINST[kind]
        each_round = zip(seconds[against], seconds[kind], strict=True)
        found[f"{kind}_of_{against}"] = statistics.median(base / taken for base, taken in each_round)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bytes", type=int, default=8 << 20, help="of a tensor")
    parser.add_argument("--count", type=int, default=32, help="tensors in a round")
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    found = measure(list(AGAINST), options.bytes, options.count, options.rounds)
    report("pipes", vars(options), found)


if __name__ == "__main__":
    main()
