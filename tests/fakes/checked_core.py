"""A core process with one more control call: `check`, which returns what is wrong with its blocks, or nothing."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Callable, Sequence

import pytest

from octavo.core.process import processes
from octavo.engine.cores.core_process import run
from octavo.engine.engine_core import EngineCore
from tests.fakes.accounting import check_scheduler

Wrap = Callable[[list[str]], list[str]]
"""Returns the command that is run instead of another."""


def spawn_checked(patch: pytest.MonkeyPatch, wrap: Wrap = list) -> None:
    """Let cores be started as processes of this module, by the command that `wrap` returns for theirs."""
    spawn = processes.spawn

    def spawned(
        module: str, arguments: Sequence[str] = (), pass_fds: Sequence[int] = ()
    ) -> tuple[socket.socket, processes.Process]:
        if module != "octavo.engine.cores.core_process":
            return spawn(module, arguments, pass_fds)
        ours, theirs = socket.socketpair()
        with theirs:
            words = wrap([sys.executable, "-m", __name__, str(theirs.fileno())])
            return ours, subprocess.Popen(words, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, process_group=0)

    patch.setattr(processes, "spawn", spawned)


def main() -> None:
    call = EngineCore.call

    def checked(core: EngineCore, method: str, *arguments: object) -> object:
        if method != "check":
            return call(core, method, *arguments)
        try:
            check_scheduler(core.scheduler)
        except AssertionError as error:
            return repr(error)
        return None

    EngineCore.call = checked  # type: ignore[method-assign]
    run()


if __name__ == "__main__":
    main()
