"""A folder in shared memory lives as long as a process uses it, however that ends."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from octavo.errors import ConfigError
from octavo.kv_transfer.host_folder import HostFolder, size_of


def test_the_last_process_removes_the_folder(tmp_path: Path) -> None:
    path = tmp_path / "octavo-kv-1"
    first, second = HostFolder(path, 1), HostFolder(path, 1)
    (path / "blocks").mkdir()
    (path / "blocks" / "a").write_bytes(b"abc")
    assert size_of(path) == 3
    first.close()
    first.close()
    assert path.exists()
    second.close()
    assert not path.exists()
    HostFolder(path, 1).close()
    assert (path.exists(), size_of(path)) == (False, 0)


def test_folders_of_killed_servers_are_removed_and_those_of_others_stay(tmp_path: Path) -> None:
    code = """
import sys, time
from pathlib import Path
from octavo.kv_transfer.host_folder import HostFolder
folder = HostFolder(Path(sys.argv[1]), 1)
print(flush=True)
time.sleep(600)
"""
    killed, other = tmp_path / "octavo-kv-killed", tmp_path / "another-kv-folder"
    other.mkdir()
    (tmp_path / "octavo-kv-killed-early").mkdir(mode=0o700)
    with subprocess.Popen([sys.executable, "-c", code, killed], stdout=subprocess.PIPE) as server:
        assert server.stdout is not None
        server.stdout.readline()
        HostFolder(tmp_path / "octavo-kv-1", 1).close()
        assert killed.exists()
        server.send_signal(signal.SIGKILL)
    with_users = HostFolder(tmp_path / "octavo-kv-2", 1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["another-kv-folder", "octavo-kv-2"]
    with_users.close()


def test_more_than_the_shared_memory_holds_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"kv_host_size is .*lower it, or give .*--shm-size"):
        HostFolder(tmp_path / "octavo-kv-1", 1 << 60)
