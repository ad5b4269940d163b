"""Blocks as files: whole or absent, of this user alone, of a bounded size, for any number of processes."""

from __future__ import annotations

import errno
import logging
import os
import random
import signal
import stat
import subprocess
import sys
from hashlib import sha256
from pathlib import Path

import pytest

from octavo.core.cache_key import CacheKey
from octavo.errors import ConfigError
from octavo.kv_cache.block_hash import extend_chain
from octavo.kv_transfer.file_store import FileStore, folder_key

KEY = folder_key({"model": "a"}, layout="x", block_size=16, layers=(0, 2), heads=(0, 4))
SIZE = 1000
FILE = SIZE + 100


def digest_of(number: int) -> bytes:
    return sha256(str(number).encode()).digest()


def content_of(number: int) -> bytes:
    return random.Random(number).randbytes(SIZE)


def write(store: FileStore, number: int) -> None:
    content = content_of(number)
    store.write(digest_of(number), 0, [memoryview(content[:300]), memoryview(content[300:])])


def read(store: FileStore, number: int) -> bytes | None:
    content = bytearray(SIZE)
    return bytes(content) if store.read(digest_of(number), 0, memoryview(content)) else None


def total(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*/*"))


def only_file(store: FileStore) -> Path:
    (path,) = store.path.iterdir()
    return path


def test_a_later_process_reads_what_was_written(tmp_path: Path) -> None:
    store = FileStore(tmp_path / "kv", KEY, 1 << 20)
    assert read(store, 1) is None
    write(store, 1)
    store.close()
    code = "from tests.kv_transfer.test_file_store import *; import sys; from pathlib import Path\n"
    code += "store = FileStore(Path(sys.argv[1]), KEY, 1 << 20); assert read(store, 1) == content_of(1)"
    subprocess.run([sys.executable, "-c", code, tmp_path / "kv"], check=True)


def test_a_block_has_a_file_for_each_cache_group(tmp_path: Path) -> None:
    store = FileStore(tmp_path, KEY, 1 << 20)
    write(store, 1)
    assert store.has(digest_of(1), 0)
    assert not store.has(digest_of(1), 1)
    store.remove(digest_of(1), 0)
    assert not store.has(digest_of(1), 0)


@pytest.mark.parametrize("change", ["layout", "block_size", "layers", "heads", "identity"])
def test_everything_that_decides_the_bytes_is_part_of_the_folder_name(tmp_path: Path, change: str) -> None:
    shared = {"identity": {"model": "a"}, "layout": "x", "block_size": 16, "layers": (0, 2), "heads": (0, 4)}
    others = {"identity": {"model": "b"}, "layout": "y", "block_size": 32, "layers": (2, 4), "heads": (4, 8)}
    write(FileStore(tmp_path, KEY, 1 << 20), 1)
    other = FileStore(tmp_path, folder_key(**{**shared, change: others[change]}), 1 << 20)  # type: ignore[arg-type]
    assert read(other, 1) is None
    assert folder_key(**shared) == KEY  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda data: data[:-1] + bytes([data[-1] ^ 1]), "checksum"),
        (lambda data: data[:500], "truncated"),
        (lambda data: data[:50], "header"),
        (lambda data: b"", "header"),
        (lambda data: b"something else" * 100, "header"),
        (lambda data: data[:60] + bytes([data[60] ^ 1]) + data[61:], "header"),
    ],
)
def test_damaged_files_are_removed(tmp_path: Path, spoil, reason: str, caplog: pytest.LogCaptureFixture) -> None:
    store = FileStore(tmp_path, KEY, 1 << 20)
    write(store, 1)
    path = only_file(store)
    path.write_bytes(spoil(path.read_bytes()))
    assert read(store, 1) is None
    assert reason in caplog.text
    assert not path.exists()
    write(store, 1)
    assert read(store, 1) == content_of(1)


def test_another_blocks_file_under_this_name_is_not_believed(tmp_path: Path) -> None:
    store, other = FileStore(tmp_path, KEY, 1 << 20), FileStore(tmp_path, bytes(32), 1 << 20)
    write(store, 1)
    whole = only_file(store).read_bytes()
    name = only_file(store).name
    (store.path / f"{digest_of(2).hex()}.0").write_bytes(whole)
    (other.path / name).write_bytes(whole)
    assert read(store, 2) is None
    assert read(other, 1) is None
    assert read(store, 1) == content_of(1)


def test_a_link_under_a_blocks_name_is_not_followed(tmp_path: Path) -> None:
    store = FileStore(tmp_path / "kv", KEY, 1 << 20)
    write(store, 1)
    elsewhere = only_file(store).rename(tmp_path / "elsewhere")
    (store.path / f"{digest_of(1).hex()}.0").symlink_to(elsewhere)
    assert read(store, 1) is None
    assert elsewhere.exists()


def test_a_pipe_under_a_blocks_name_is_not_waited_for(tmp_path: Path) -> None:
    store = FileStore(tmp_path / "kv", KEY, 1 << 20)
    write(store, 1)
    path = only_file(store)
    path.unlink()
    os.mkfifo(path)
    assert read(store, 1) is None
    assert not path.exists()
    store.close()


def test_a_damaged_count_is_made_again(tmp_path: Path) -> None:
    store = FileStore(tmp_path / "kv", KEY, 4 * FILE)
    os.truncate(tmp_path / "kv" / "usage", 3)
    for number in range(9):
        write(store, number)
    assert store.is_saving
    assert read(store, 8) == content_of(8)
    assert total(tmp_path / "kv") <= 4 * FILE
    store.close()


def test_only_this_user_reads(tmp_path: Path) -> None:
    previous = os.umask(0)
    try:
        store = FileStore(tmp_path / "kv", KEY, 1 << 20)
        write(store, 1)
    finally:
        os.umask(previous)
    for path in [tmp_path / "kv", *(tmp_path / "kv").rglob("*")]:
        assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0, path


def test_a_folder_that_others_may_write_to_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    with pytest.raises(ConfigError, match=r"kv_disk is .*others may use it \(mode 777\).*name a directory"):
        FileStore(tmp_path, KEY, 1 << 20)
    tmp_path.chmod(0o755)
    FileStore(tmp_path, KEY, 1 << 20).path.chmod(0o750)
    with pytest.raises(ConfigError, match="others may use it"):
        FileStore(tmp_path, KEY, 1 << 20)


def test_a_folder_of_another_user_and_a_link_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    with pytest.raises(ConfigError, match="kv_disk is"):
        FileStore(tmp_path / "link", KEY, 1 << 20)
    monkeypatch.setattr(os, "geteuid", lambda: tmp_path.stat().st_uid + 1)
    with pytest.raises(ConfigError, match="belongs to another user"):
        FileStore(tmp_path, KEY, 1 << 20)


def test_the_files_used_longest_ago_are_removed_of_all_keys(tmp_path: Path) -> None:
    store, other = (FileStore(tmp_path, key, 10 * FILE) for key in (KEY, bytes(32)))
    for number in range(5):
        write(store, number)
        write(other, number)
    for number in range(5):
        os.utime(store.path / f"{digest_of(number).hex()}.0", ns=(0, 2 * number))
        os.utime(other.path / f"{digest_of(number).hex()}.0", ns=(0, 2 * number + 1))
    store.touch(digest_of(0), 0)
    store.touch(digest_of(99), 0)
    write(store, 5)
    assert total(tmp_path) <= 10 * FILE
    assert read(other, 0) is None
    assert [read(store, number) is not None for number in range(6)] == [True, False, True, True, True, True]


def test_a_full_disk_ends_saving_with_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store = FileStore(tmp_path, KEY, 1 << 20)
    write(store, 1)

    def writev(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "writev", writev)
    with caplog.at_level(logging.INFO):
        write(store, 2)
        write(store, 3)
    assert [record.message for record in caplog.records] == [
        f"no more KV blocks are saved in {store.path}: No space left on device"
    ]
    assert read(store, 1) == content_of(1)
    assert total(tmp_path) == FILE


def test_a_block_larger_than_the_size_is_not_kept(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = FileStore(tmp_path, KEY, SIZE)
    write(store, 1)
    assert "1,100 bytes" in caplog.text
    assert read(store, 1) is None


def test_what_a_process_killed_while_it_wrote_has_left_is_swept(tmp_path: Path) -> None:
    code = """
import os, sys, time
from tests.kv_transfer.test_file_store import *
store = FileStore(Path(sys.argv[1]), KEY, 1 << 20)
whole = os.writev
def half(file, parts):
    whole(file, [parts[0], parts[1][:100]])
    print("half", flush=True)
    time.sleep(600)
write(store, 1)
os.writev = half
write(store, 2)
"""
    with subprocess.Popen([sys.executable, "-c", code, tmp_path], stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == b"half\n"
        (partial,) = tmp_path.glob("*/*.partial")
        assert read(FileStore(tmp_path, KEY, 1 << 20), 2) is None
        assert partial.exists()  # its process lives
        assert total(tmp_path) == 2 * FILE
        writer.send_signal(signal.SIGKILL)
    store = FileStore(tmp_path, KEY, 1 << 20)
    assert not partial.exists()
    assert read(store, 1) == content_of(1)
    assert read(store, 2) is None
    write(store, 2)
    assert read(store, 2) == content_of(2)


def test_two_processes_share_a_folder_and_its_size(tmp_path: Path) -> None:
    code = """
import sys
from tests.kv_transfer.test_file_store import *
store, chosen = FileStore(Path(sys.argv[1]), KEY, 20 * FILE), random.Random(sys.argv[2])
found = 0
for _ in range(600):
    number = chosen.randrange(40)
    have = read(store, number)
    assert have is None or have == content_of(number)
    found += have is not None
    write(store, number)
    assert store.is_saving
assert found > 50
"""
    folder = tmp_path / "kv"
    arguments = [sys.executable, "-c", code, folder]
    workers = [subprocess.Popen([*arguments, str(number)]) for number in range(2)]
    assert [worker.wait() for worker in workers] == [0, 0]
    assert total(folder) <= 20 * FILE
    assert not list(folder.glob("*/*.partial"))


def test_another_keys_salt_never_finds_a_block(tmp_path: Path) -> None:
    store, tokens = FileStore(tmp_path, KEY, 1 << 20), list(range(32))
    keys = [
        CacheKey(cache_salt, cache_namespace=namespace) for cache_salt in (None, "s", "t") for namespace in (None, "s")
    ]
    chains = [extend_chain([], tokens, 16, key) for key in keys]
    for number, chain in enumerate(chains):
        assert not any(store.has(digest, 0) for other in chains[number:] for digest in other)
        for digest in chain:
            store.write(digest, 0, [memoryview(bytes(SIZE))])
        assert all(store.has(digest, 0) for digest in chain)
