"""Starts the process of an engine core, which may be done before it is known what it will run.

The process imports what every engine needs while it waits for its configuration.
"""

from __future__ import annotations

import socket
import subprocess
import sys
from types import TracebackType
from typing import Final, Self

from octavo.engine.shared_work import SharedWork

_END_TIMEOUT_S: Final = 5.0


class SpawnedCore:
    """A process, our end of its connection, and what it works at, until `take` passes them on.

    The end of a `with` block ends what was not taken.
    """

    def __init__(self, process: subprocess.Popen[bytes], connection: socket.socket, work: SharedWork) -> None:
        self._process = process
        self._connection = connection
        self._work = work
        self._is_taken = False

    @classmethod
    def spawn(cls) -> Self:
        """Start `python -m octavo.engine.core_process`."""
        work = SharedWork.create()
        ours, theirs = socket.socketpair()
        try:
            # a process group of its own: Ctrl-C on a terminal goes to the front alone
            process = subprocess.Popen(
                [sys.executable, "-m", "octavo.engine.core_process", str(theirs.fileno()), str(work.descriptor)],
                pass_fds=[theirs.fileno(), work.descriptor],
                stdin=subprocess.DEVNULL,
                process_group=0,
            )
        except BaseException:
            ours.close()
            work.close()
            raise
        finally:
            theirs.close()
        return cls(process, ours, work)

    def take(self) -> tuple[subprocess.Popen[bytes], socket.socket, SharedWork]:
        """The process, the connection and the work, which are the caller's from now on."""
        assert not self._is_taken, "a core runs one engine"
        self._is_taken = True
        return self._process, self._connection, self._work

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._is_taken:
            return
        self._work.close()
        self._connection.close()  # upon which it ends by itself
        try:
            self._process.wait(_END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
