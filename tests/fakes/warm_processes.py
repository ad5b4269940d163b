"""Starts modules in forks of a process that has imported what they need, which takes longer than most tests.

The fork becomes a child of the process that asked for it. It has its environment, working directory, stdout and stderr,
and runs the module from its first line, as `processes.spawn` does. All forks have one seed of hashes: that
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

from octavo.core.light_torch import import_meta_registrations, without_meta_registrations
from octavo.core.process import processes
from octavo.core.process.processes import Process, end_now, spawn

_SET_PARENT_DEATH_SIGNAL, _SET_CHILD_SUBREAPER = 1, 36
"""Options of Linux's prctl: the signal that this process gets when its parent ends; if orphans become its children."""
_TEXT = "octavo.server.text_process"
_WARM = ("octavo.engine.cores.core_process", "octavo.executor.rank_process", _TEXT)
SERVER = "octavo.__main__"
"""The module of the command line: it gets a source of its own, for what it starts."""
_FIRST_FREE = 300
"""Descriptors from here on, and behind those that are asked for, are expected to be free."""
_ANSWER_S = 120.0
"""How long a fork may take, the first imports of a server included."""
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

    def __init__(self, control: socket.socket | None = None) -> None:
        self._lock = threading.Lock()
        self._control = control
        self._source: Process | None = None
        # libraries read some of it as they are imported: not that of the test which happens to be first
        self._environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}  # numpy would start threads as it is imported

    def spawn(
        self, module: str, arguments: Sequence[str] = (), pass_fds: Sequence[int] = ()
    ) -> tuple[socket.socket, Process]:
        """Do what `processes.spawn` does. Modules of tests import less, and start as they do there."""
        if module not in _WARM:
            return spawn(module, arguments, pass_fds)
        ours, theirs = socket.socketpair()
        with theirs:
            numbers = [theirs.fileno(), *pass_fds]
            try:
                process = self.fork([module, str(theirs.fileno()), *arguments], [1, 2, *numbers], [1, 2, *numbers])
            except BaseException:
                ours.close()
                raise
        return ours, process

    def fork(self, words: Sequence[str], descriptors: Sequence[int], numbers: Sequence[int]) -> Process:
        """Run a module, the first of its words, in a fork that has the descriptors under these numbers."""
        wanted = {"words": words, "numbers": numbers, "environment": dict(os.environ), "folder": os.getcwd()}
        wanted["parent"] = os.getpid()
        with self._lock:
            control = self._control = self._control or self._start()
            _control_process(_SET_CHILD_SUBREAPER, 1)
            try:
                socket.send_fds(control, [json.dumps(wanted).encode()], descriptors)
                pid = int(control.recv(100))
            except BaseException:  # Ctrl-C too: the answer would be taken for that to the next request
                self._drop()
                raise
            finally:
                _control_process(_SET_CHILD_SUBREAPER, 0)
        return _Adopted(pid, words)

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
                env=self._environment,
                process_group=0,
            )
        return ours

    def close(self) -> None:
        """End the process that forks."""
        if self._source is not None and self._control is not None:
            self._control.close()
            assert self._source.wait(60) == 0

    def _drop(self) -> None:
        """Take another process that forks from the next request on."""
        if self._control is not None:
            self._control.close()
        if self._source is not None:
            self._source.kill()
            self._source.wait()
        self._control = self._source = None


def _control_process(option: int, value: int) -> None:
    assert ctypes.CDLL(None).prctl(option, value, 0, 0, 0) == 0


def _serve(control: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """Fork for each request until there are no more. Returns None then; in a fork, what was asked for and its
    descriptors."""
    while True:
        text, descriptors, *_ = socket.recv_fds(control, _MESSAGE_BYTES, _MOST_DESCRIPTORS)
        if not text:
            return None
        wanted: dict[str, Any] = json.loads(text)
        if wanted["words"][0] == SERVER:
            _import_a_server()
        elif wanted["words"][0] == _TEXT:
            import_meta_registrations()  # before transformers, which such a process imports where it reads images
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
        return wanted, descriptors


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
    folders = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[1:1] = [each for each in folders if each and each not in sys.path]
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.argv = words = wanted["words"]
    if words[0] == SERVER:
        end_with_parent(wanted["parent"])
        _fork_what_a_server_starts()
    sys.modules.pop(words[0], None)  # it is run again, as the program
    runpy.run_module(words[0], run_name="__main__", alter_sys=True)


def end_with_parent(parent: int) -> None:
    """Have the system kill this process when its parent ends: nothing else stops the servers of a test run that was
    killed. All other processes see that their sockets are closed.
    """
    _control_process(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != parent:
        end_now(1)  # it has ended before


def _import_a_server() -> None:
    """Import what a server and its processes for images need, which takes seconds; once, for all servers."""
    import_meta_registrations()
    import transformers

    import octavo.server.serving  # noqa: F401

    assert transformers.CLIPImageProcessorPil, "the parts that image processors share"


def _fork_what_a_server_starts() -> None:
    """Leave a fork behind from which the server, which will have threads, gets its cores and processes for text."""
    ours, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
    if os.fork():
        theirs.close()
        processes.spawn = WarmProcesses(ours).spawn
        return
    ours.close()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    asked = _serve(theirs)
    if asked is None:
        end_now(0)
    _become(*asked)


def main() -> None:
    """Import what cores, ranks and processes for text need, and serve forks."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that asks ends this one
    with without_meta_registrations():
        import jinja2  # noqa: F401
        import tokenizers  # noqa: F401

        import octavo.engine.engine_core
        import octavo.server.text_process
        import octavo.worker.worker  # noqa: F401
    assert len(list(Path("/proc/self/task").iterdir())) == 1, "a fork has one thread, and locks that others held"
    asked = _serve(socket.socket(fileno=int(sys.argv[1])))
    if asked is None:
        end_now(0)
    _become(*asked)


if __name__ == "__main__":
    main()
