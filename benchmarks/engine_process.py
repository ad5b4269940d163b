"""An engine in a process of its own: started, asked, held still while another is measured, and weighed.

All engines that are compared are loaded at the same time and take turns. Those whose turn it is not are stopped by
a signal, so that a thread of theirs that waits by spinning takes nothing from the one that is measured.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import msgspec

from benchmarks.workloads import Event
from octavo.errors import ConfigError, EngineDeadError

_DRIVER = Path(__file__).parent / "driver.py"
_EXIT_TIMEOUT_S = 20.0


class Answer(msgspec.Struct, frozen=True):
    """One run: seconds of the engine's own clock, and what could be seen when. Or why there was none."""

    began: float = 0.0
    events: list[Event] = []
    ended: float = 0.0
    error: str | None = None


class Ready(msgspec.Struct, frozen=True):
    """The first line of a driver."""

    load_s: float
    facts: dict[str, Any]


@dataclass
class EngineProcess:
    """A driver that has loaded its model; `with` ends it, and everything that it started.

    words: the command, from `command_with_driver`. log: file for what it prints.
    """

    name: str
    words: list[str]
    log: Path
    load_s: float = field(init=False)
    facts: dict[str, Any] = field(init=False)
    cold_start_s: float = field(init=False)
    """Seconds from nothing to the first token of a prompt of 16."""
    first_token_s: float = field(init=False)

    def __enter__(self) -> Self:
        began = time.perf_counter()
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                self.words,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,  # a group of its own to stop, and out of reach of Ctrl-C
            )
        try:
            ready = msgspec.json.decode(self._line(), type=Ready)
            answer = self.run([[11] * 16], 1)
        except BaseException:
            self._kill()
            raise
        if answer.error is not None:
            self._kill()
            raise EngineDeadError(f"{self.name} cannot make a first token: {answer.error}")
        self.cold_start_s = time.perf_counter() - began
        self.first_token_s = answer.events[0][0] - answer.began
        self.load_s, self.facts = ready.load_s, ready.facts
        return self

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        assert self._process.stdin is not None
        if kind is not None:
            return self._kill()  # nobody waits for what it is at
        self.resume()
        with suppress(BrokenPipeError):  # it may be gone
            self._process.stdin.close()
        try:
            self._process.wait(_EXIT_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            print(f"{self.name} does not end by itself and is killed", file=sys.stderr)
        return self._kill()

    def run(self, prompts: list[list[int]], max_tokens: int) -> Answer:
        """Continue all prompts at once by exactly `max_tokens`. Raises EngineDeadError when the process is gone."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(msgspec.json.encode({"prompts": prompts, "max_tokens": max_tokens}) + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError as error:
            raise self._death() from error
        return msgspec.json.decode(self._line(), type=Answer)

    def pause(self) -> None:
        """Hold it still; it has stopped when this returns."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGSTOP)
            os.waitid(os.P_PID, self._process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)

    def resume(self) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGCONT)

    def memory_mb(self) -> dict[str, int]:
        """Of all its processes: resident now (pages that they share counted for each), proportionally, and at most."""
        tree = list(process_tree(self._process.pid))
        return {
            "rss": sum(_kib(pid, "status", "VmRSS:") for pid in tree) // 1024,
            "pss": sum(_kib(pid, "smaps_rollup", "Pss:") for pid in tree) // 1024,
            "peak_rss": sum(_kib(pid, "status", "VmHWM:") for pid in tree) // 1024,
        }

    def cpu_s(self) -> float:
        """Processor seconds that its processes have used."""
        ticks = 0
        for pid in process_tree(self._process.pid):
            fields = _stat(pid)
            ticks += int(fields[11]) + int(fields[12]) if fields else 0
        return ticks / os.sysconf("SC_CLK_TCK")

    def _line(self) -> bytes:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise self._death()
        return line

    def _death(self) -> EngineDeadError:
        words = self.log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        last = words[-1] if words else "it said nothing"
        return EngineDeadError(f"{self.name} ended: {last} (all that it printed: {self.log})")

    def _kill(self) -> None:
        """End what is left of the group, which is the whole engine: it began in a session of its own."""
        with suppress(ProcessLookupError):  # nothing is left
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with suppress(BrokenPipeError):
                pipe.close()


def command_with_driver(words: list[str]) -> list[str]:
    """The command with `driver.py` before the driver of the engine. Raises ConfigError where there is none."""
    for i, word in enumerate(words):
        if word.endswith(".py"):
            if not Path(word).is_file():
                raise ConfigError(f"there is no driver {word}")
            return [*words[:i], str(_DRIVER), *words[i:]]
    raise ConfigError(
        f"--against {' '.join(words)!r} names no driver; give PYTHON DRIVER.py ARGUMENTS, see {_DRIVER.name}"
    )


def machine_cpu_s() -> float:
    """Processor seconds that the whole machine has used, time stolen from it included."""
    ticks = [int(word) for word in Path("/proc/stat").read_text(encoding="ascii").splitlines()[0].split()[1:9]]
    user, nice, system, _idle, _waiting, *interrupts_and_stolen = ticks
    return (user + nice + system + sum(interrupts_and_stolen)) / os.sysconf("SC_CLK_TCK")


def process_tree(root: int) -> Iterator[int]:
    """`root` and everything below it."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and (fields := _stat(int(entry.name))):
            children.setdefault(int(fields[1]), []).append(int(entry.name))
    pending = [root]
    while pending:
        pid = pending.pop()
        yield pid
        pending += children.get(pid, [])


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat after the name; none when the process has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return []


def _kib(pid: int, file: str, key: str) -> int:
    try:
        lines = Path(f"/proc/{pid}/{file}").read_text(encoding="utf-8", errors="replace").splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith(key)), 0)
