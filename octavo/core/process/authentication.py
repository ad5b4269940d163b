"""Proof that both ends of a connection know a secret, before anything else is read of it.

Either end sends a nonce, and the HMAC of both nonces with the secret.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import socket
import tempfile
from contextlib import suppress
from os.path import expanduser
from pathlib import Path
from typing import Final, TypeVar

import msgspec

from octavo.core.messages import CoreFailed
from octavo.core.process import frames
from octavo.errors import ConfigError, EngineDeadError

Reply = TypeVar("Reply", bound=msgspec.Struct)

GREETING_S: Final = 10.0
"""How long a connection may take to prove itself."""

_NONCE_BYTES: Final = 32
_PROOF_BYTES: Final = 32
_LEAST_SECRET: Final = 16


def read_secret(path: str | None) -> bytes:
    """Return the secret in a file. Raises ConfigError."""
    if path is None:
        raise ConfigError("cluster_secret_file is not set; give all machines the same secret")
    try:
        secret = Path(expanduser(path)).read_bytes().strip()
    except OSError as error:
        raise ConfigError(f"cluster_secret_file is {path}, which cannot be read: {error.strerror}") from error
    if len(secret) < _LEAST_SECRET:
        raise ConfigError(
            f"cluster_secret_file is {path}, whose secret has {len(secret)} bytes, must have at least {_LEAST_SECRET}; "
            "`openssl rand -hex 32` makes one"
        )
    return secret


def private_secret(directory: Path) -> Path:
    """Return the file in a private directory with a secret for processes of one user, made at its first use.

    Raises ConfigError when it cannot be made.
    """
    path = directory / "secret"
    if path.exists():
        return path
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(dir=directory)  # readable by its owner alone
        with open(descriptor, "w") as file:
            file.write(secrets.token_hex(_NONCE_BYTES))
        with suppress(FileExistsError):  # another process was first
            os.link(name, path)
        os.unlink(name)
    except OSError as error:
        raise ConfigError(
            f"cluster_secret_file is not set, and {path} cannot be made: {error.strerror}; give a file"
        ) from error
    return path


def authenticate(connection: socket.socket, secret: bytes, *, is_listener: bool) -> bool:
    """Return whether the other end knows the secret, after this end has proved it. A listener proves it second.

    Raises OSError when the other end closes the connection before it has begun.
    """
    ours = secrets.token_bytes(_NONCE_BYTES)
    connection.sendall(ours)
    theirs = frames.read_exactly(connection, _NONCE_BYTES)
    if theirs is None:
        raise ConnectionError("it was closed")
    nonces = (ours, theirs) if is_listener else (theirs, ours)

    def proof(by_listener: bool) -> bytes:
        return hmac.digest(secret, bytes([by_listener]) + b"".join(nonces), hashlib.sha256)

    if not is_listener:
        connection.sendall(proof(by_listener=False))
    found = frames.read_exactly(connection, _PROOF_BYTES)
    if found is None or not hmac.compare_digest(found, proof(by_listener=not is_listener)):
        return False
    if is_listener:
        connection.sendall(proof(by_listener=True))
    return True


def introduce(
    connection: socket.socket, secret: bytes, message: msgspec.Struct, reply: type[Reply], where: str
) -> Reply:
    """Prove the secret, send what this end is, and return the reply of the listener at `where`.

    Raises ConfigError for a listener with another secret, EngineDeadError when it closes the connection, and the error
    with which it refuses.
    """
    if not authenticate(connection, secret, is_listener=False):
        raise ConfigError(
            f"{where} does not know the secret of cluster_secret_file; give all machines the same, and check that no "
            "other program listens there"
        )
    connection.sendall(frames.pack(message))
    body = frames.read(connection)
    if body is None:
        raise EngineDeadError(f"{where} has closed the connection")
    found: Reply | CoreFailed = msgspec.msgpack.decode(body, type=reply | CoreFailed)
    if isinstance(found, CoreFailed):
        raise found.error(f"{where}: ")
    keep_alive(connection)
    connection.settimeout(None)
    return found


def keep_alive(connection: socket.socket, most_s: int = 30) -> None:
    """Send small frames at once, and notice within `most_s` seconds that the other machine has vanished. No effect on a
    Unix socket."""
    if connection.family == socket.AF_UNIX:
        return
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    # of the time a third passes before the first of four questions
    values = {"KEEPIDLE": most_s // 3, "KEEPINTVL": most_s // 6, "KEEPCNT": 4, "USER_TIMEOUT": most_s * 1000}
    for name, value in values.items():
        if hasattr(socket, f"TCP_{name}"):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, f"TCP_{name}"), value)
