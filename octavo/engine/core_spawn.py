"""Starts modules in processes of their own: that of an engine core may start before it is known what it will run.

It imports what every engine needs while it waits for its configuration.
"""

from __future__ import annotations

import socket
import subprocess
import sys
from typing import Final, Self

SHUTDOWN_TIMEOUT_S: Final = 10.0
"""How long a core may take to end by itself before it is terminated, and after that until it is killed."""


def spawn(module: str) -> tuple[socket.socket, subprocess.Popen[bytes]]:
    """Start `python -m module FD`, and return the connection whose other end is its descriptor FD, and the process."""
    ours, theirs = socket.socketpair()
    with theirs:
        # a process group of its own: Ctrl-C on a terminal goes to the front alone
        process = subprocess.Popen(
            [sys.executable, "-m", module, str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            process_group=0,
        )
    return ours, process


class SpawnedCore:
    """The process of a core and this end of its connection.

    The end of a `with` block ends the process unless `is_used` was set, as the client of the core does.
    """

    def __init__(self) -> None:
        self.connection, self.process = spawn("octavo.engine.core_process")
        self.is_used = False

    def end(self, timeout_s: float = SHUTDOWN_TIMEOUT_S) -> None:
        """Wait for the process to end, with force when that takes longer than `timeout_s`."""
        for force in (self.process.terminate, self.process.kill):
            try:
                self.process.wait(timeout_s)
                return
            except subprocess.TimeoutExpired:
                force()
                timeout_s = SHUTDOWN_TIMEOUT_S
        self.process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        if not self.is_used:
            self.connection.close()  # upon which it ends by itself
            self.end()
