"""A private folder of a server, for KV blocks in shared memory or for sockets; it exists as long as a process uses
it."""

from __future__ import annotations

import fcntl
import os
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Final

from octavo.errors import ConfigError
from octavo.kv_transfer.file_store import open_private

_USERS: Final = ".users"
"""A file on which every process that uses the folder has a shared lock, which ends with the process."""


class HostFolder:
    """This process's use of a folder. The last process to close it removes the folder."""

    def __init__(self, path: Path, num_bytes: int = 0) -> None:
        """Make the folder if there is none, and remove those of killed servers: their names differ only after the last
        dash.

        Raises ConfigError where shared memory cannot have `num_bytes`.
        """
        self.path = path
        for other in path.parent.glob(f"{path.name.rpartition('-')[0]}-*"):
            if other != path:
                with suppress(OSError):
                    _remove_unused(other)
        room = shutil.disk_usage(path.parent)
        if num_bytes > room.total:
            raise ConfigError(
                f"kv_host_size is {num_bytes:,} bytes, and {path.parent} holds {room.total:,}; lower it, or give the "
                "system or the container more shared memory (docker run --shm-size)"
            )
        self._users = _use(path)

    def close(self) -> None:
        """End the use. Idempotent."""
        if self._users >= 0:
            os.close(self._users)
            self._users = -1
            with suppress(OSError):  # another process uses it, or removes it
                _remove_unused(self.path)


def size_of(path: Path) -> int:
    """Return the bytes that a folder has now; 0 where there is none."""
    sizes = 0
    for file in path.glob("*/*"):
        with suppress(OSError):  # another process may remove it at the same moment
            sizes += file.stat().st_size
    return sizes


def _use(path: Path) -> int:
    """Return a descriptor whose lock prevents removal of the folder, which is made if there is none."""
    while True:
        os.close(open_private(path))
        with suppress(FileNotFoundError):  # another process has just removed the folder
            users = os.open(path / _USERS, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            fcntl.flock(users, fcntl.LOCK_SH)
            if os.fstat(users).st_nlink:
                return users
            os.close(users)


def _remove_unused(path: Path) -> None:
    """Remove a folder of this user that no process uses. Raises OSError if it is in use or of another user."""
    if not path.exists():
        return
    os.close(open_private(path))
    users = os.open(path / _USERS, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(users, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(path)
    finally:
        os.close(users)
