"""Both ends of a pipe in one process, for every kind of pipe."""

from __future__ import annotations

import itertools
import tempfile
import threading
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from octavo.pipes import address
from octavo.pipes.pipe import Listener, Pipe, connect

SECRET = b"a secret of these tests"
WAIT_S = 100.0
HAS_NIXL = find_spec("nixl") is not None
SCHEMES = tuple(name for name in address.SCHEMES if name != "nixl" or HAS_NIXL)

_numbers = itertools.count()


def fresh_address(scheme: str) -> str:
    """Return an address that nothing listens on; the path of a Unix socket has to be short."""
    if not address.SCHEMES[scheme].is_local:
        return f"{scheme}://127.0.0.1:0"
    return f"{scheme}://{tempfile.gettempdir()}/octavo-pipe-{Path('/proc/self').resolve().name}-{next(_numbers)}"


class Ends:
    """A listener, the pipe that it has accepted, and the pipe that connected."""

    def __init__(self, scheme: str, **limits: Any) -> None:
        self.listener: Listener = Listener(fresh_address(scheme), SECRET, **limits)
        self.limits = limits
        self.near: Pipe = connect(self.listener.address, SECRET, **limits | {"deadline_s": WAIT_S})
        self.far: Pipe = self.listener.accept(WAIT_S)
        self.near._deadline_s = self.far._deadline_s

    def close(self) -> None:
        for each in (self.near, self.far, self.listener):
            each.close()


class Running:
    """A call in a thread of its own, whose result or error is returned by `result`."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self._call = call
        self._value: Any = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._value = self._call()
        except BaseException as error:
            self._error = error

    def is_done(self, wait_s: float) -> bool:
        self._thread.join(wait_s)
        return not self._thread.is_alive()

    def result(self) -> Any:
        assert self.is_done(WAIT_S), "the call still waits"
        if self._error is not None:
            raise self._error
        return self._value
