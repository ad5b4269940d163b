"""Starts the process of an engine core, which may be done before it is known what it will run.

The process imports what every engine needs while it waits for its configuration.
"""

from __future__ import annotations

import socket
import subprocess
import sys
from types import TracebackType
from typing import Final, Self

_END_TIMEOUT_S: Final = 5.0


class SpawnedCore:
    """A process and our end of its connection, until `take` passes both on; the end of a `with` block ends the rest."""

    def __init__(self, process: subprocess.Popen[bytes], connection: socket.socket) -> None:
        self._process = process
        self._connection = connection
        self._is_taken = False

    @classmethod
    def spawn(cls) -> Self:
        """Start `python -m octavo.engine.core_process`."""
        ours, theirs = socket.socketpair()
        try:
            # a process group of its own: Ctrl-C on a terminal goes to the front alone
            process = subprocess.Popen(
                [sys.executable, "-m", "octavo.engine.core_process", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                process_group=0,
            )
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        return cls(process, ours)

    def take(self) -> tuple[subprocess.Popen[bytes], socket.socket]:
        """The process and the connection, which are the caller's from now on."""
        assert not self._is_taken, "a core runs one engine"
        self._is_taken = True
        return self._process, self._connection

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._is_taken:
            return
        self._connection.close()  # upon which it ends by itself
        try:
            self._process.wait(_END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
