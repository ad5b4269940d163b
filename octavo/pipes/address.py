"""Addresses of pipes, whose schemes say what carries the bytes."""

from __future__ import annotations

import socket
from pkgutil import resolve_name
from typing import Final, NamedTuple
from urllib.parse import urlsplit

from octavo.errors import ConfigError
from octavo.pipes.carrier import Carrier


class Scheme(NamedTuple):
    """How the ends of a pipe find each other, and what carries its bytes.

    opener: "module:function", imported with the first pipe, for what it needs may not be installed; it raises
    ConfigError then, and PipeError or OSError for the other end. is_local: an address is the path of a Unix socket,
    which the permissions of its file protect; else it is a host and a port, which need a secret.
    """

    opener: str
    is_local: bool

    def open_carrier(self, connection: socket.socket, *, is_listener: bool) -> Carrier:
        """Return the carrier of a connection whose other end has proved the secret; it then owns the connection."""
        opened: Carrier = resolve_name(self.opener)(connection, is_listener=is_listener)
        return opened


SCHEMES: Final = {
    "tcp": Scheme("octavo.pipes.socket_pipe:open_socket", is_local=False),
    "unix": Scheme("octavo.pipes.socket_pipe:open_socket", is_local=True),
    "shm": Scheme("octavo.pipes.shared_memory_pipe:open_shared_memory", is_local=True),
    "nixl": Scheme("octavo.pipes.nixl_pipe:open_nixl", is_local=False),
}


class Address(NamedTuple):
    """A parsed address.

    place: the path of a Unix socket, or host and port.
    """

    scheme: str
    family: socket.AddressFamily
    place: str | tuple[str, int]

    @classmethod
    def parse(cls, text: str, secret: bytes | None) -> Address:
        """Raises ConfigError, also where any process could connect without a secret."""
        try:
            parts = urlsplit(text)
            host, port = parts.hostname, parts.port
        except ValueError as error:
            raise ConfigError(f"{text!r} is no address of a pipe: {error}") from error
        scheme = SCHEMES.get(parts.scheme)
        if scheme is not None and scheme.is_local and not parts.netloc and parts.path.startswith("/"):
            return cls(parts.scheme, socket.AF_UNIX, parts.path)
        if scheme is not None and not scheme.is_local and host and port is not None:
            if not secret:
                raise ConfigError(f"{text} needs a secret, since any process can connect; set cluster_secret_file")
            return cls(parts.scheme, socket.AF_INET6 if ":" in host else socket.AF_INET, (host, port))
        forms = ", ".join(f"{name}://{'/path' if each.is_local else 'host:port'}" for name, each in SCHEMES.items())
        raise ConfigError(f"{text!r} is no address of a pipe; expected one of {forms}")

    def __str__(self) -> str:
        if isinstance(self.place, str):
            return f"{self.scheme}://{self.place}"
        host, port = self.place
        return f"{self.scheme}://[{host}]:{port}" if ":" in host else f"{self.scheme}://{host}:{port}"
