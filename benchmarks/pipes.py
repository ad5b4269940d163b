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
from octavo.pipes.address import SCHEMES
from octavo.pipes.pipe import Listener, connect

AGAINST = {"shm": "memcpy", "tcp": "sendall", "unix": "sendall", "nixl": "sendall"}
"""What each pipe is compared with."""


def reader(kind: str, address: str, secret: bytes, num_bytes: int) -> Callable[[], object]:
    """Connect, and return what receives one tensor."""
    if kind != "sendall":
        pipe = connect(address, secret)
        return pipe.recv_tensor
    host, port = address.split(":")
    connection = socket.create_connection((host, int(port)))
    buffer = memoryview(bytearray(num_bytes))

    def read() -> None:
        got = 0
        while got < num_bytes:
            got += connection.recv_into(buffer[got:])

    return read


def receive(addresses: dict[str, str], secret: bytes, num_bytes: int, calls: Connection) -> None:
    """Receive as many tensors over a kind of pipe as each call says, and confirm them. Runs in a process."""
    torch.set_num_threads(1)
    readers = {kind: reader(kind, address, secret, num_bytes) for kind, address in addresses.items()}
    while (call := calls.recv()) is not None:
        kind, count = call
        for _ in range(count):
            readers[kind]()
        calls.send(None)


class Ways:
    """All ways to another process."""

    def __init__(self, kinds: list[str], tensors: list[torch.Tensor]) -> None:
        self._tensors = tensors
        secret = secrets.token_bytes(32)
        plain = socket.create_server(("127.0.0.1", 0))
        path = f"{tempfile.gettempdir()}/octavo-pipes-{os.getpid()}"
        places = {kind: f"{path}.{kind}" if SCHEMES[kind].is_local else "127.0.0.1:0" for kind in kinds}
        listeners = {kind: Listener(f"{kind}://{place}", secret) for kind, place in places.items()}
        addresses = {"sendall": f"127.0.0.1:{plain.getsockname()[1]}"}
        addresses |= {kind: listener.address for kind, listener in listeners.items()}
        context = multiprocessing.get_context("spawn")
        self._calls, theirs = context.Pipe()
        self._process = context.Process(
            target=receive, args=[addresses, secret, tensors[0].nbytes, theirs], daemon=True
        )
        self._process.start()
        connection, _ = plain.accept()
        pipes = {kind: listener.accept() for kind, listener in listeners.items()}
        self._opened = [plain, connection, *listeners.values(), *pipes.values(), self._calls]
        self._sends: dict[str, Callable[[torch.Tensor], None]] = {
            kind: pipe.send_tensor for kind, pipe in pipes.items()
        }
        self._sends["sendall"] = lambda tensor: connection.sendall(tensor.numpy().data)

    def send(self, kind: str) -> float:
        """Return the seconds until the other end has all tensors."""
        send = self._sends[kind]
        began = time.perf_counter()
        self._calls.send((kind, len(self._tensors)))
        for tensor in self._tensors:
            send(tensor)
        self._calls.recv()
        return time.perf_counter() - began

    def close(self) -> None:
        self._calls.send(None)
        self._process.join()
        for each in self._opened:
            each.close()


def measure(kinds: list[str], num_bytes: int, count: int, rounds: int) -> dict[str, float]:
    """Return the median GB/s of memcpy, of plain sockets and of each kind of pipe, and the medians of the ratios."""
    torch.set_num_threads(1)
    # more than the caches of a processor keep, as with the KV of a prompt
    tensors = [torch.randint(0, 256, (num_bytes,), dtype=torch.uint8) for _ in range(count)]
    targets = [np.zeros(num_bytes, np.uint8) for _ in range(count)]
    ways = Ways(kinds, tensors)

    def memcpy() -> float:
        began = time.perf_counter()
        for target, tensor in zip(targets, tensors, strict=True):
            np.copyto(target, tensor.numpy())
        return time.perf_counter() - began

    seconds: dict[str, list[float]] = {kind: [] for kind in ("memcpy", "sendall", *kinds)}
    for number in range(rounds + 1):
        for kind, each in seconds.items():
            taken = memcpy() if kind == "memcpy" else ways.send(kind)
            if number:  # the first round touches memory for the first time
                each.append(taken)
    ways.close()
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
    parser.add_argument("--kinds", nargs="+", default=["shm", "tcp", "unix"], choices=list(AGAINST))
    options = parser.parse_args()
    found = measure(options.kinds, options.bytes, options.count, options.rounds)
    report("pipes", vars(options), found)


if __name__ == "__main__":
    main()
