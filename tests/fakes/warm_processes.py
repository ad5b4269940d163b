"""Starts modules in forks of a process that has imported torch, which takes longer than what most tests ask of them.

The fork becomes a child of the process that asked for it. It has its environment, working directory, stdout and stderr,
and runs the module from its first line, as `octavo.core.processes.spawn` does. All forks have one seed of hashes: that
ranks agree where the order of a set differs is seen by tests that are marked `cold` alone.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from octavo.core.processes import Process, end_now, spawn

_SET_CHILD_SUBREAPER = 36
"""The option of Linux's prctl by which orphans become children of the calling process."""
_IMPORT_TORCH = ("octavo.engine.core_process", "octavo.executor.rank_process")
_FIRST_FREE = 300
"""Descriptors from here on, and behind those that are asked for, are expected to be free."""
_ANSWER_S = 60.0
"""How long a fork may take."""
_MESSAGE_BYTES = 1 << 20
_MOST_DESCRIPTORS = 30


class _Adopted(subprocess.Popen[bytes]):
    """A child of this process that another one has started. Waiting and signals are those of any child."""

    def __init__(self, pid: int, words: Sequence[str]) -> None:
        self.args, self.pid, self.returncode = list(words), pid, None  # type: ignore[assignment]
        self.stdin = self.stdout = self.stderr = None
        self._child_created, self._waitpid_lock, self._sigint_wait_secs = True, threading.Lock(), 0.25


class WarmProcesses:
    """Has the process that forks, which starts when it is first needed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._control: socket.socket | None = None
        self._source: Process | None = None

    def spawn(
        self, module: str, arguments: Sequence[str] = (), pass_fds: Sequence[int] = ()
    ) -> tuple[socket.socket, Process]:
        """Do what `octavo.core.processes.spawn` does. Modules of tests import less, and start as they do there."""
        if module not in _IMPORT_TORCH:
            return spawn(module, arguments, pass_fds)
        ours, theirs = socket.socketpair()
        with theirs, self._lock:
            words = [module, str(theirs.fileno()), *arguments]
            numbers = [1, 2, theirs.fileno(), *pass_fds]
            wanted = {"words": words, "numbers": numbers, "environment": dict(os.environ), "folder": os.getcwd()}
            control = self._control = self._control or self._start()
            _adopt_orphans(True)
            try:
                socket.send_fds(control, [json.dumps(wanted).encode()], numbers)
                pid = int(control.recv(100))
            except (OSError, ValueError):  # an answer that comes later would be taken for that to the next request
                self._control = None
                ours.close()
                control.close()
                raise
            finally:
                _adopt_orphans(False)
        return ours, _Adopted(pid, words)

    def _start(self) -> socket.socket:
        ours, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
        ours.settimeout(_ANSWER_S)
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _MESSAGE_BYTES)
        with theirs:
            self._source = subprocess.Popen(
                [sys.executable, "-m", __name__, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                cwd=Path(__file__).parents[2],
                env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},  # numpy would start threads as it is imported
                process_group=0,
            )
        return ours

    def close(self) -> None:
        """End the process that forks."""
        if self._source is not None and self._control is not None:
            self._control.close()
            assert self._source.wait(60) == 0


def _adopt_orphans(is_on: bool) -> None:
    assert ctypes.CDLL(None).prctl(_SET_CHILD_SUBREAPER, int(is_on), 0, 0, 0) == 0


def _serve(control: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """Fork for each request until there are no more. Returns None then; in a fork, what was asked for and its
    descriptors."""
    while True:
        text, descriptors, *_ = socket.recv_fds(control, _MESSAGE_BYTES, _MOST_DESCRIPTORS)
        if not text:
            return None
        between = os.fork()
        if between:
            os.waitpid(between, 0)  # its child becomes one of the process that asks
            for each in descriptors:
                os.close(each)
            continue
        between = os.getpid()
        if os.fork():
            os._exit(0)
        while os.getppid() == between:
            time.sleep(0.001)
        with control:
            control.send(str(os.getpid()).encode())
        return json.loads(text), descriptors


def renumber(descriptors: Sequence[int], numbers: Sequence[int]) -> None:
    """Give each descriptor its number, whatever the others have now."""
    first = max(_FIRST_FREE, *numbers) + 1
    free = [fcntl.fcntl(each, fcntl.F_DUPFD, first) for each in descriptors]
    for each in descriptors:
        os.close(each)
    for number, each in zip(numbers, free, strict=True):
        os.dup2(each, number)
        os.close(each)


def _become(wanted: dict[str, Any], descriptors: list[int]) -> None:
    """Give this process the descriptors, environment and folder that were asked for, and run the module."""
    os.setpgid(0, 0)
    renumber(descriptors, wanted["numbers"])
    os.environ.clear()
    os.environ.update(wanted["environment"])
    os.chdir(wanted["folder"])
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.argv = words = wanted["words"]
    sys.modules.pop(words[0], None)  # it is run again, as the program
    runpy.run_module(words[0], run_name="__main__", alter_sys=True)


def main() -> None:
    """Import what cores and ranks need, and serve forks."""
    from octavo.core.light_torch import without_meta_registrations

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that asks ends this one
    with without_meta_registrations():
        import octavo.engine.engine_core
        import octavo.worker.worker  # noqa: F401
    assert len(list(Path("/proc/self/task").iterdir())) == 1, "a fork has one thread, and locks that others held"
    asked = _serve(socket.socket(fileno=int(sys.argv[1])))
    if asked is None:
        end_now(0)
    _become(*asked)


if __name__ == "__main__":
    main()
