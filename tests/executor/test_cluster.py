"""How ranks of several machines come together: which are admitted, and which error names those that do not come."""

from __future__ import annotations

import logging
import socket
import struct
import threading

import pytest

from octavo.core.process import frames
from octavo.errors import ConfigError, EngineDeadError, OctavoError
from octavo.executor.cluster import Gathering, Join, connect
from tests.executor.test_conformance import free_port

SECRET = b"0123456789abcdef"


def test_ranks_of_two_machines_with_two_each_join_in_any_order() -> None:
    port = free_port()
    gathering = Gathering("127.0.0.1", port, SECRET, 2, range(1, 3))
    joined = [connect("127.0.0.1", port, SECRET, Join(node, index), 10.0) for node, index in [(2, 1), (1, 0), (2, 0)]]
    assert [each.rank for _, each in joined] == [5, 2, 4]
    joined.append(connect("127.0.0.1", port, SECRET, Join(1, 1), 10.0))
    ranks = gathering.wait(200.0)
    assert [rank.number for rank in ranks] == [2, 3, 4, 5]
    assert ranks[0].name == "rank 2 (at 127.0.0.1)"
    for connection in [*(connection for connection, _ in joined), *(rank.connection for rank in ranks)]:
        connection.close()


def test_ranks_that_do_not_come_are_listed_with_their_machines() -> None:
    port = free_port()
    gathering = Gathering("127.0.0.1", port, SECRET, 2, range(1, 3))
    connection, _ = connect("127.0.0.1", port, SECRET, Join(1, 1), 10.0)
    with connection, pytest.raises(EngineDeadError) as raised:
        gathering.wait(0.2)
    assert "after 0.2 s ranks are missing: 2, 4, 5, of node 1, 2; start `octavo rank`" in str(raised.value)


def test_a_machine_whose_number_is_taken_is_refused() -> None:
    port = free_port()
    gathering = Gathering("127.0.0.1", port, SECRET, 1, range(1, 3))
    connection, _ = connect("127.0.0.1", port, SECRET, Join(1, 0), 10.0)
    with connection:
        for node in (1, 3):
            with pytest.raises(ConfigError, match=f"node {node} is not missing"):
                connect("127.0.0.1", port, SECRET, Join(node, 0), 10.0)
        with pytest.raises(EngineDeadError, match="missing: 2, of node 2;"):
            gathering.wait(0.0)


def test_a_machine_without_the_secret_is_not_let_in(caplog: pytest.LogCaptureFixture) -> None:
    port = free_port()
    gathering = Gathering("127.0.0.1", port, SECRET, 1, range(1, 2))
    with caplog.at_level(logging.WARNING, "octavo"), pytest.raises(ConfigError, match="does not know the secret"):
        connect("127.0.0.1", port, b"another secret..", Join(1, 0), 10.0)
    with pytest.raises(EngineDeadError, match=r"missing: 1, of node 1; without the secret came 127\.0\.0\.1;"):
        gathering.wait(0.1)
    assert "127.0.0.1 has connected without the secret" in caplog.messages


def test_a_first_machine_that_is_not_there_is_waited_for_and_then_named(caplog: pytest.LogCaptureFixture) -> None:
    port = free_port()
    with (
        caplog.at_level(logging.INFO, "octavo"),
        pytest.raises(EngineDeadError, match=f"has not been at 127.0.0.1:{port} for 0.6 s"),
    ):
        connect("127.0.0.1", port, SECRET, Join(1, 0), 0.6)
    assert caplog.messages == [f"waiting for the first machine at 127.0.0.1:{port}, for at most 0.6 s"]
    with pytest.raises(ConfigError, match="master_addr is a..b, which is no name of a machine"):
        connect("a..b", port, SECRET, Join(1, 0), 0.6)


@pytest.mark.parametrize("says", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n" * 4], ids=["nothing", "something"])
def test_another_program_at_the_first_machine_is_named(says: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        where = server.getsockname()

        def reset() -> None:
            connection, _ = server.accept()
            connection.recv(1)  # a reset while it connects would be tried again, and nothing accept that
            connection.sendall(says)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            connection.close()

        for _ in range(5):  # the reset is noticed where something is sent or where it is read
            other = threading.Thread(target=reset)
            other.start()
            with pytest.raises(OctavoError, match=f"{where[0]}:{where[1]} .*cluster_secret_file"):
                connect(*where, SECRET, Join(1, 0), 10.0)
            other.join()


def test_frames_of_another_protocol_are_not_read() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(b"GET / HTTP/1.1\r\n")
        with pytest.raises(ValueError, match="at most 268435456 are expected"):
            frames.read(theirs)
