"""What the system knows of a connection and the event loop does not. A `connection` may be that of uvloop."""

from __future__ import annotations

import fcntl
import socket
import sys
import termios
from typing import Any, Final

CAN_SEE_RESETS: Final = sys.platform == "linux"
"""Whether `is_reset` works on this system."""

_DEAD_PEER_S: Final = 120
"""How long a machine that has gone may leave packets unanswered."""
_TCP_CLOSE: Final = 7
"""The state of a connection that its peer has reset, in the first byte of Linux's TCP_INFO."""


def drop_dead_peers(connection: Any) -> None:
    """Have the system end a connection whose other machine has gone without a word."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if sys.platform == "linux":
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _DEAD_PEER_S // 2)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _DEAD_PEER_S // 8)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _DEAD_PEER_S * 1000)


def is_reset(connection: Any) -> bool:
    """Has the other end refused what was sent, because nobody has the connection there any more?"""
    state: bytes = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)
    return state[0] == _TCP_CLOSE


def has_unread_bytes(connection: Any) -> bool:
    """Have bytes arrived that the event loop has not come to yet?"""
    if connection.fileno() < 0:
        return False
    waiting: bytes = fcntl.ioctl(connection.fileno(), termios.FIONREAD, bytes(4))
    return any(waiting)
