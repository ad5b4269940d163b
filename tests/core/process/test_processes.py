"""The failure of a process, as the one that started it gets it."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest

import octavo
from octavo.core.messages import CoreFailed
from octavo.core.process import frames
from octavo.core.process.processes import ProcessState, report_failure


def test_process_that_reports_its_failure_leaves_messages_to_the_thread_that_reads_them() -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        with ours:
            ours.sendall(frames.pack("a message"))
            ours.shutdown(socket.SHUT_WR)
            report_failure(theirs, CoreFailed(message="no memory is left"))
            body = frames.read(ours)
        assert body is not None
        assert msgspec.msgpack.decode(body, type=CoreFailed).message == "no memory is left"
        assert frames.read(theirs) == frames.encode("a message")


def test_process_whose_first_thread_waits_for_one_that_computes_works() -> None:
    """Where processors are scarce it may use none for long, and does not hang."""
    code = "import threading\ndef spin():\n    while True: pass\nthreading.Thread(target=spin).start()"
    with subprocess.Popen([sys.executable, "-c", code]) as process:
        try:
            while (before := ProcessState.of(process.pid)) is None or before.code != "R" or before.cpu_s < 0.2:
                time.sleep(0.01)
            states = [ProcessState.of(process.pid) for _ in range(20)]
            assert all(state is not None and state.has_worked_since(state) for state in states)
        finally:
            process.kill()


@pytest.mark.parametrize(("flags", "exit_code"), [(["-P"], 1), ([], 0)])
def test_process_imports_from_the_directory_if_its_parent_does(
    flags: list[str], exit_code: int, tmp_path: Path
) -> None:
    """The console script does not: a checkout around it, or a file called torch.py, is none of its business."""
    (tmp_path / "only_here.py").touch()
    code = "from octavo.core.process.processes import spawn; raise SystemExit(spawn('only_here')[1].wait())"
    environment = {**os.environ, "PYTHONPATH": str(Path(octavo.__file__).parents[1])}
    command = [sys.executable, *flags, "-c", code]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, check=False)
    assert done.returncode == exit_code, done.stderr
