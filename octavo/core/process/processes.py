"""Starts modules in processes of their own, ends them, and says how they ended. Each end sees the other's as EOF."""

from __future__ import annotations

import logging
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple, NoReturn

from octavo.errors import OctavoError

if TYPE_CHECKING:  # a process is started before anything is imported that can wait
    from octavo.core.messages import CoreFailed

LINGER_S: Final = 2.0
"""How long a process that has failed waits until the one that started it has read why."""

SHUTDOWN_TIMEOUT_S: Final = 10.0
"""How long a process may take to end by itself before it is terminated."""
_KILL_AFTER_S: Final = 2.0
"""How long a terminated process may take to end before it is killed."""

_TICK_S: Final = 1 / os.sysconf("SC_CLK_TCK")

_log = logging.getLogger(__name__)

Process = subprocess.Popen[bytes]


class ProcessState(NamedTuple):
    """code: one letter, as in /proc/PID/stat: that of a thread which runs or waits for a processor or a device, where
    there is one, else that of the first. cpu_s: processor time of all threads so far."""

    code: str
    cpu_s: float

    @classmethod
    def of(cls, pid: int) -> ProcessState | None:
        """Return None where the system has no such file, or when the process has ended."""
        try:
            code, *fields = _stat_of(Path(f"/proc/{pid}"))
            codes = [_stat_of(thread)[0] for thread in Path(f"/proc/{pid}/task").iterdir()] if code in "SI" else []
        except (FileNotFoundError, ProcessLookupError):  # it has ended, or a thread has
            return None
        code = next((each for each in codes if each in "RD"), code)
        return cls(code, (int(fields[10]) + int(fields[11])) * _TICK_S)

    @property
    def is_stopped(self) -> bool:
        """Return whether a signal or a debugger has stopped the process."""
        return self.code in "Tt"

    def has_worked_since(self, before: ProcessState) -> bool:
        """Whether the process runs, waits for a device, or has used processor time."""
        return self.code in "RD" or self.cpu_s > before.cpu_s


def _stat_of(path: Path) -> list[str]:
    """Return the fields behind the name of a process or a thread; the first is the letter of its state."""
    return (path / "stat").read_text().rpartition(")")[2].split()


def python() -> list[str]:
    """Return the command of an interpreter that imports from the working directory only if this one does. With `-m` or
    `-c` alone it would look there first, and might find another octavo, such as a checkout without the compiled
    library.
    """
    imports_from_here = any(os.path.exists(path or ".") and os.path.samefile(path or ".", ".") for path in sys.path)
    return [sys.executable] if imports_from_here else [sys.executable, "-P"]


def spawn(module: str, arguments: Sequence[str] = (), pass_fds: Sequence[int] = ()) -> tuple[socket.socket, Process]:
    """Start `python -m module FD` with further arguments; return the connection to its descriptor FD, and the process.

    pass_fds: other descriptors that the process inherits under their numbers.
    """
    ours, theirs = socket.socketpair()
    with theirs:
        # a process group of its own: Ctrl-C on a terminal goes to the front alone
        process = subprocess.Popen(
            [*python(), "-m", module, str(theirs.fileno()), *arguments],
            pass_fds=[theirs.fileno(), *pass_fds],
            stdin=subprocess.DEVNULL,
            process_group=0,
        )
    return ours, process


def end(process: Process, timeout_s: float = SHUTDOWN_TIMEOUT_S) -> None:
    """Wait for the process to end, with force when that takes longer than `timeout_s`. One that is stopped goes on."""
    process.send_signal(signal.SIGCONT)
    for force in (process.terminate, process.kill):
        try:
            process.wait(timeout_s)
            return
        except subprocess.TimeoutExpired:
            force()
            timeout_s = _KILL_AFTER_S
    process.wait()


def how_it_ended(name: str, process: Process) -> str:
    """Return what is known about a process that has closed its connection without a message."""
    try:
        code = process.wait(5.0)
    except subprocess.TimeoutExpired:
        return f"{name} (process {process.pid}) has closed its connection but still runs"
    if code == -9:
        return f"{name} was killed (signal 9); unless someone did it by hand, the machine ran out of memory"
    how = f"signal {-code}" if code < 0 else f"exit code {code}"
    return f"{name} has stopped ({how}); its log says more"


def report_failure(connection: socket.socket, failure: CoreFailed) -> None:
    """Send why this process ends to the one that started it, and wait a moment for it to close the connection.

    A connection that is closed here with unread messages would be reset, and the failure lost.
    """
    from octavo.core.process import frames

    try:
        connection.sendall(frames.pack(failure))
        connection.shutdown(socket.SHUT_WR)
    except OSError:
        _log.error("%s", failure.message)  # the other end has gone
        return
    poll = select.poll()  # it reads nothing: another thread may be in the middle of a frame
    poll.register(connection, select.POLLRDHUP)
    poll.poll(LINGER_S * 1000)


def run_reporting(name: str, report: Callable[[CoreFailed], None], work: Callable[[], None]) -> int:
    """Run what a process is for. Returns its exit code: 0, or 1 after a failure, which `report` is called with."""
    from octavo.core.messages import CoreFailed

    try:
        work()
    except OctavoError as error:
        report(CoreFailed(message=str(error), kind=type(error).__name__))
        return 1
    except Exception as error:
        _log.exception("%s failed", name)
        message = f"{name} failed ({type(error).__name__}: {error}); its log has the traceback"
        report(CoreFailed(message=message))
        return 1
    return 0


def end_now(exit_code: int) -> NoReturn:
    """End this process at once, after it has released its resources: a normal exit takes another second to destroy
    modules.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)


def end_with(descriptors: Iterable[int], exit_code: int, after_s: float = 0.0) -> NoReturn:
    """Wait until the other end of a connection is closed, and end this process that many seconds later, whatever it
    does."""
    poll = select.poll()
    for descriptor in descriptors:
        poll.register(descriptor, getattr(select, "POLLRDHUP", 0))
    poll.poll()
    time.sleep(after_s)
    os._exit(exit_code)
