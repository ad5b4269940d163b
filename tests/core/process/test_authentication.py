"""Both ends of a connection know the secret, or nothing else is read of it."""

from __future__ import annotations

import socket
import threading
from pathlib import Path

import pytest

from octavo.core.process import frames
from octavo.core.process.authentication import authenticate, keep_alive, read_secret
from octavo.errors import ConfigError

SECRET = b"0123456789abcdef"


@pytest.mark.parametrize("reflects", [False, True])
def test_a_connection_that_proves_nothing_is_not_believed(reflects: bool) -> None:
    """What another protocol sends, and what this end sends itself, reflected."""
    ours, theirs = socket.socketpair()
    results: list[bool] = []
    listener = threading.Thread(target=lambda: results.append(authenticate(theirs, SECRET, is_listener=True)))
    listener.start()
    with ours, theirs:
        nonce = frames.read_exactly(ours, 32)
        assert nonce is not None
        ours.sendall(nonce + nonce if reflects else b"GET / HTTP/1.1\r\n" * 4)
        listener.join(100)
        assert results == [False]


def test_secrets_are_read_from_files_and_have_a_least_length(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_text("0123456789abcdef\n")
    assert read_secret(str(file)) == SECRET
    file.write_text("short\n")
    with pytest.raises(ConfigError, match="has 5 bytes, must have at least 16; `openssl rand -hex 32`"):
        read_secret(str(file))
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        read_secret(str(tmp_path / "none"))
    with pytest.raises(ConfigError, match="cluster_secret_file is not set"):
        read_secret(None)


def test_machines_that_vanish_are_noticed() -> None:
    with socket.socket() as connection:
        keep_alive(connection, 120)
        assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
