"""Listeners among connections that prove nothing, that come slowly, and that leave no descriptors."""

from __future__ import annotations

import errno
import gc
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue

import pytest

from octavo.core.process import listening
from octavo.core.process.authentication import authenticate
from octavo.core.process.listening import Greetings, in_time, listen_privately, own_address
from octavo.errors import ConfigError

SECRET = b"a secret of a test"


class Served:
    """A listener that counts who has proved the secret."""

    def __init__(self) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.greetings = Greetings()
        self.greeted: SimpleQueue[bool] = SimpleQueue()
        self.greetings.begin(self.listener, self.serve, "test")
        [self.thread] = [each for each in threading.enumerate() if each.name == "test-listener"]

    def serve(self, connection: socket.socket) -> None:
        with connection, suppress(OSError):
            with self.greetings.limited(connection):
                is_known = authenticate(connection, SECRET, is_listener=True)
            self.greeted.put(is_known)

    def connect(self) -> socket.socket:
        return socket.create_connection(self.listener.getsockname(), timeout=100)

    def close(self) -> None:
        self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()
        self.thread.join(100)
        assert not self.thread.is_alive()


@pytest.fixture
def served() -> Iterator[Served]:
    made = Served()
    yield made
    made.close()


def test_silent_connections_keep_no_one_out(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listening, "MOST_GREETINGS", 3)
    silent = []
    for _ in range(12):
        silent.append(served.connect())
        assert len(silent[-1].recv(64)) == 32  # its greeting has begun: they have the order in which they came
    for each in silent[:9]:  # the oldest are ended
        while each.recv(64):
            pass
    with served.connect() as known:
        assert authenticate(known, SECRET, is_listener=False)
    for each in silent:
        each.close()


def test_a_greeting_ends_in_time_however_slowly_its_bytes_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listening, "GREETING_S", 0.1)
    near, far = socket.socketpair()
    began = time.monotonic()
    with near, far, in_time(near), suppress(BrokenPipeError):
        while time.monotonic() - began < 30:
            far.send(b"x")
            near.recv(1)
            time.sleep(0.001)
    assert time.monotonic() - began < 30


def test_a_greeting_without_a_thread_for_its_end_is_a_failed_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    near, far = socket.socketpair()
    with near, far, pytest.raises(OSError, match="can't start new thread"), in_time(near):
        pass


def test_a_listener_without_descriptors_accepts_again(monkeypatch: pytest.MonkeyPatch) -> None:
    class Exhausted(socket.socket):
        num_left = 2

        def accept(self) -> tuple[socket.socket, object]:  # type: ignore[override]
            if self.num_left:
                self.num_left -= 1
                raise OSError(errno.EMFILE, "Too many open files")
            return super().accept()

    monkeypatch.setattr(listening, "_PAUSE_S", 0.001)
    monkeypatch.setattr(socket, "create_server", lambda place: _bound(Exhausted(), place))
    served = Served()
    with served.connect() as known:
        assert authenticate(known, SECRET, is_listener=False)
    served.close()


def _bound(listener: socket.socket, place: tuple[str, int]) -> socket.socket:
    listener.bind(place)
    listener.listen()
    return listener


def test_a_unix_socket_is_for_its_user_alone_and_one_that_cannot_be_made_is_closed(tmp_path: Path) -> None:
    gc.collect()  # or what other tests have left is closed meanwhile
    before = len(os.listdir("/proc/self/fd"))
    with listen_privately(str(tmp_path / "control")):
        assert (tmp_path / "control").stat().st_mode & 0o777 == 0o600
        with pytest.raises(OSError, match="another process listens on it"):
            listen_privately(str(tmp_path / "control"))
    with pytest.raises(OSError, match="its path has .* at most 107; choose a shorter folder"):
        listen_privately(str(tmp_path / ("x" * 200)))
    with pytest.raises(FileNotFoundError):
        listen_privately(str(tmp_path / "none" / "control"))
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_rank_finds_its_own_address_towards_another_machine() -> None:
    assert own_address("127.0.0.1") == "127.0.0.1"
    for name in ("no.such.host.invalid", "a..b"):
        with pytest.raises(ConfigError, match=f"master_addr {name} cannot be reached"):
            own_address(name)
