"""What the system knows of a connection."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator

import pytest

from octavo.server.http import sockets
from octavo.server.http.sockets import CAN_SEE_RESETS, bind, has_unread_bytes, is_reset, stop_listening
from tests.server.raw import eventually


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Both ends of a TCP connection."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = socket.create_connection(listener.getsockname())
        server, _ = listener.accept()
    with client, server:
        yield client, server


def test_unread_bytes_are_seen_until_they_are_read(ends: tuple[socket.socket, socket.socket]) -> None:
    client, server = ends
    assert not has_unread_bytes(server)
    client.sendall(b"a" * 256)
    eventually(lambda: has_unread_bytes(server))
    server.recv(1000)
    assert not has_unread_bytes(server)
    server.close()
    assert not has_unread_bytes(server)


@pytest.mark.skipif(not CAN_SEE_RESETS, reason="only Linux shows the state of a connection")
def test_half_closed_client_is_there_until_it_refuses_a_byte(ends: tuple[socket.socket, socket.socket]) -> None:
    client, server = ends
    client.shutdown(socket.SHUT_WR)
    server.sendall(b"a")
    assert client.recv(1) == b"a"
    assert not is_reset(server)
    client.close()
    server.sendall(b"a")
    eventually(lambda: is_reset(server))


@pytest.mark.anyio
async def test_a_late_loop_accepts_every_connection_before_the_listener_closes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sockets, "_HANDSHAKE_S", 0)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(await reader.read(1))
        writer.close()

    listener = bind("127.0.0.1", 0)
    server = await asyncio.start_server(answer, sock=listener)
    clients = [socket.create_connection(listener.getsockname()) for _ in range(8)]
    for client in clients:
        client.sendall(b"a")
    await stop_listening(server, listener)
    for client in clients:
        with client:
            assert await asyncio.to_thread(client.recv, 1) == b"a"
