"""The folder with packed weights of many models: its size, the file that is read ahead, work in the background.

Imports no torch, so that a file can be checked while torch is imported.
"""

from __future__ import annotations

import atexit
import logging
import os
import shutil
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from octavo.config.explain import render_bytes
from octavo.errors import ConfigError
from octavo.models.content import Stopped
from octavo.models.packed_file import Distrust, PackedFile, read_identity

_log = logging.getLogger(__name__)

SUFFIX: Final = ".packed"
RECORD_SUFFIX: Final = ".files.json"
"""Ends the name of the record (`octavo.models.content`) that lies beside a file."""
_LEAVE_FREE_BYTES: Final = 1 << 30
_NICE: Final = 10
"""Niceness of the background thread: it gets a tenth of a busy processor, and all of an idle one."""
_LAST_WAIT_S: Final = 5.0
"""Seconds that the end of a program waits for weights that are being written."""


class PackedFolder:
    """`directory` with at most `max_bytes` of packed weights; `threads` compute checksums.

    `is_default` is set where the user did not name the directory: its errors are then notes in the log, no warnings.
    """

    def __init__(self, directory: Path, *, max_bytes: int, threads: int = 1, is_default: bool = False) -> None:
        self.directory = directory
        self.threads = threads
        self.is_default = is_default
        self._max_bytes = max_bytes
        self._ahead: PackedFile | None = None
        self._stop = threading.Event()
        self._background: threading.Thread | None = None

    def make(self) -> None:
        """Make the directory if the user named it; the default one is made when something is kept.

        Raises ConfigError.
        """
        if self.is_default:
            return
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"packed_cache is {self.directory}, which is no directory and cannot be made one ({error.strerror}); "
                "name a directory that may be written to"
            ) from error

    def read_ahead(self, wanted: Mapping[str, Any]) -> bool:
        """Check the latest file whose identity has the values `wanted`, in a thread; False where there is none."""
        for path in self._by_age(newest_first=True):
            identity = read_identity(path)
            if identity is None or any(identity.get(name) != value for name, value in wanted.items()):
                continue
            try:
                self._ahead = file = PackedFile.open(path)
            except (Distrust, FileNotFoundError):
                return False
            threading.Thread(target=self._verify, args=(file,), name="octavo-read-ahead", daemon=True).start()
            return True
        return False

    def open(self, path: Path) -> PackedFile:
        """Return the file at `path`. Raises FileNotFoundError and Distrust."""
        ahead, self._ahead = self._ahead, None
        return ahead if ahead is not None and ahead.path == path else PackedFile.open(path)

    def make_room(self, path: Path, num_bytes: int) -> str | None:
        """Remove the files that were used longest ago, so that `path` may take `num_bytes`; else the reason why not."""
        if num_bytes > self._max_bytes:
            return f"they take {render_bytes(num_bytes)}, packed_cache_size is {render_bytes(self._max_bytes)}"
        others = [each for each in self._by_age() if each != path]
        sizes = {each: _size(each) for each in others}
        while others and sum(sizes[each] for each in others) + num_bytes > self._max_bytes:
            remove(others[0])
            _log.info("removed %s: packed_cache_size is %s", others[0], render_bytes(self._max_bytes))
            del others[0]
        free = shutil.disk_usage(self.directory).free
        if free < num_bytes + _LEAVE_FREE_BYTES:
            return f"they take {render_bytes(num_bytes)}, the disk has {render_bytes(free)} left"
        return None

    def note(self, message: str, *arguments: object) -> None:
        """Log why weights are not kept: as a warning where the user named the directory."""
        _log.log(logging.INFO if self.is_default else logging.WARNING, message, *arguments)

    def in_background(self, work: Callable[[threading.Event], None]) -> None:
        """Run `work` in a thread of low priority. It raises Stopped soon after its event is set."""
        self.close(_LAST_WAIT_S)
        self._stop = threading.Event()
        thread = threading.Thread(target=_run, args=(work, self._stop), name="octavo-packed-cache", daemon=True)
        self._background = thread
        atexit.register(self.close, _LAST_WAIT_S)
        thread.start()

    def close(self, wait_s: float = 0.0) -> None:
        """Wait `wait_s` for the background work, then stop it. Idempotent."""
        thread, self._background = self._background, None
        if thread is not None:
            with suppress(KeyboardInterrupt):
                thread.join(wait_s)
            self._stop.set()
            thread.join(_LAST_WAIT_S)
            atexit.unregister(self.close)

    def _verify(self, file: PackedFile) -> None:
        with suppress(Distrust):  # it is raised again where the file is used
            file.verify(self.threads)

    def _by_age(self, *, newest_first: bool = False) -> list[Path]:
        """Return all files in the order of their last use, oldest first unless `newest_first`."""
        times = {}
        for path in self.directory.glob(f"*{SUFFIX}"):
            with suppress(OSError):  # another process may remove it at the same moment
                times[path] = path.stat().st_mtime
        return sorted(times, key=lambda path: times[path], reverse=newest_first)


def _run(work: Callable[[threading.Event], None], stop: threading.Event) -> None:
    if sys.platform == "linux":  # where a thread has a priority of its own
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
    with suppress(Stopped):
        work(stop)


def remove(path: Path) -> None:
    """Remove a file of packed weights with its record."""
    path.unlink(missing_ok=True)
    path.with_name(path.name + RECORD_SUFFIX).unlink(missing_ok=True)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
