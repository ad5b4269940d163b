"""`octavo serve` in a fork of a process that has imported what the server, its core and its processes for text need.

Tests of how servers start and end use `ServerProcess` of `tests/server/test_serve_process.py`.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from tempfile import TemporaryFile

from tests.fakes.warm_processes import SERVER, WarmProcesses
from tests.server.raw import eventually


class WarmServer:
    """A server on a free port; `url` is known once it is ready."""

    def __init__(self, source: WarmProcesses, model: Path, *arguments: str) -> None:
        self._output = TemporaryFile()  # noqa: SIM115
        descriptor = self._output.fileno()
        words = [SERVER, "serve", str(model), "--port", "0", *arguments]
        self._process = source.fork(words, [descriptor] * 2, [1, 2])
        try:
            eventually(lambda: self._url() or self._process.poll() is not None)
        except BaseException:  # Ctrl-C and a test's time limit too
            self._process.kill()  # nobody else knows of it
            raise
        self.url = self._url()
        assert self.url, self._written()

    def _written(self) -> str:
        return os.pread(self._output.fileno(), 1 << 20, 0).decode()

    def _url(self) -> str:
        found = re.search(r"http://127\.0\.0\.1:[0-9]+", self._written())
        return "" if found is None else found[0]

    def stop(self) -> int:
        """End the server with a signal, and return its exit code."""
        if self._process.poll() is None:
            self._process.terminate()
        with self._output:
            return self._process.wait(100)
