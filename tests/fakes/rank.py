"""A rank that computes with the hash executor, in this process or, as `python -m tests.fakes.rank FD`, in another."""

from __future__ import annotations

import os
import sys
import threading
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Final

from octavo.config.schema import EngineConfig
from octavo.core.process.rendezvous import Rendezvous
from octavo.core.step import ModelRunnerOutput, SchedulerOutput
from octavo.errors import CheckpointError, ConfigError, EngineDeadError
from octavo.executor.executor import Meet, Notify
from octavo.executor.rank_process import main
from tests.fakes.executor import HashExecutor

FAILS: Final = -2
"""The step in which rank 1 raises."""
MEETS: Final = -3
"""The step in which rank 1 computes without end, and the others wait for it as in a collective call."""
NOTES: Final = -4
"""The step after which each rank sends `NUM_NOTES` notes of `NOTE_BYTES` from a thread, numbered by their bytes."""
NUM_NOTES: Final = 50
NOTE_BYTES: Final = 10_000
BLOCK_SIZE: Final = 4


class FakeRank:
    """Has the calls of a worker. Its plan is what it was started with."""

    def __init__(
        self,
        config: EngineConfig,
        rank: int,
        rendezvous: Rendezvous | None,
        notify: Notify | None = None,
        meet: Meet | None = None,
    ) -> None:
        self._config = config
        self._rank = rank
        self._notify = notify
        self._executor = HashExecutor(BLOCK_SIZE)
        self._poison = threading.Event()
        self._reason = ""
        self.is_shut_down = False

    def submit(self, step: SchedulerOutput) -> Future[ModelRunnerOutput]:
        if step.step_id == FAILS and self._rank == 1:
            return failed(RuntimeError("the disk is on fire"))
        if step.step_id in (FAILS, MEETS):
            is_poisoned = self._poison.wait(60.0 if self._rank else self._config.device.distributed_timeout_seconds)
            return failed(EngineDeadError(self._reason if is_poisoned else "rank 1 has not come"))
        if step.step_id == NOTES:
            threading.Thread(target=self._send_notes).start()
        return self._executor.submit(step)

    def _send_notes(self) -> None:
        assert self._notify is not None
        for number in range(NUM_NOTES):
            self._notify(bytes([number]) * NOTE_BYTES)

    def call(self, method: str, *arguments: Any) -> list[Any]:
        if method == "load" and self._rank == 1:
            raise CheckpointError("the disk is broken")
        if method == "load":
            self._poison.wait(60.0)
            raise EngineDeadError(self._reason)
        if method == "release_memory" and self._rank == 1:
            raise ConfigError(f"{arguments[0]} is not what rank 1 has")
        if method == "profile":
            end = time.monotonic() + self._rank
            while time.monotonic() < end:
                pass  # a process that writes a trace works
            return [None]
        if method == "identity":
            return [{"seen GPUs": os.environ.get("CUDA_VISIBLE_DEVICES", "all")}]
        return [[(str(self._rank), str(self._config.device.threads), str(os.getpid()))]]

    def poison(self, reason: str) -> None:
        self._reason = reason
        self._poison.set()

    def shutdown(self) -> None:
        self.is_shut_down = True


def failed(error: Exception) -> Future[ModelRunnerOutput]:
    future: Future[ModelRunnerOutput] = Future()
    future.set_exception(error)
    return future


def is_running(pid: int) -> bool:
    """Whether there is such a process, ended but unread ones (zombies) not counted."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


if __name__ == "__main__":
    sys.exit(main(FakeRank))
