"""TLS, and a Unix socket in place of an address."""

from __future__ import annotations

import http.client
import json
import socket
import ssl
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, chdir, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from octavo.config.server_args import ServerArgs
from octavo.errors import ConfigError
from octavo.server.http.encryption import Encrypted
from octavo.server.http.http_protocol import HttpProtocol
from octavo.server.http.sockets import listening, tls_context
from tests.server.conftest import Served
from tests.server.raw import events, eventually

Start = Callable[..., Served]
HEADERS = {"Content-Type": "application/json"}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return make_pair(tmp_path_factory.mktemp("tls"))


def make_pair(folder: Path) -> dict[str, str]:
    """A key and a certificate for localhost that it has signed itself."""
    key, certificate = folder / "key.pem", folder / "cert.pem"
    made = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2"]
    names = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    files = ["-keyout", str(key), "-out", str(certificate)]
    subprocess.run(["openssl", "req", "-x509", *made, *names, *files], check=True, capture_output=True)
    return {"ssl_keyfile": str(key), "ssl_certfile": str(certificate)}


@contextmanager
def connected(served: Served, context: ssl.SSLContext) -> Iterator[http.client.HTTPSConnection]:
    address = socket.create_connection(("127.0.0.1", urlsplit(served.url).port or 0), timeout=100)
    connection = http.client.HTTPSConnection("127.0.0.1", timeout=100)
    with address, context.wrap_socket(address, server_hostname="127.0.0.1") as connection.sock:
        yield connection


def answer(connection: http.client.HTTPConnection, body: Any = None) -> tuple[int, bytes]:
    method, path = ("GET", "/v1/models") if body is None else ("POST", "/v1/completions")
    connection.request(method, path, None if body is None else json.dumps(body), HEADERS)
    response = connection.getresponse()
    return response.status, response.read()


def test_requests_and_streams_go_through_tls(start_server: Start, pair: dict[str, str]) -> None:
    served = start_server(**pair, max_body_size=1000)
    context = ssl.create_default_context(cafile=pair["ssl_certfile"])
    with connected(served, context) as connection:
        assert answer(connection)[0] == 200
        status, body = answer(connection, {"prompt": "a", "max_tokens": 3, "stream": True})
        assert (status, events(body)[-1]) == (200, "[DONE]")
        # the body is refused before it is read: its sender still reads the error
        assert answer(connection, {"prompt": "a" * (1 << 20)})[0] == 413
    with pytest.raises(ssl.SSLError), connected(served, ssl.create_default_context()):
        pass


def test_certificate_is_renewed_without_a_restart(start_server: Start, pair: dict[str, str], tmp_path: Path) -> None:
    mine = {name: str(tmp_path / name) for name in pair}
    for name in pair:
        Path(mine[name]).write_bytes(Path(pair[name]).read_bytes())
    served = start_server(**mine)
    context = ssl.create_default_context(cafile=pair["ssl_certfile"])
    Path(mine["ssl_keyfile"]).write_text("broken")
    served.on_loop(served.http.reload)
    for _ in range(3):
        with connected(served, context) as connection:
            assert answer(connection)[0] == 200
    other = make_pair(tmp_path)
    for name in pair:
        Path(mine[name]).write_bytes(Path(other[name]).read_bytes())
    served.on_loop(served.http.reload)

    def renewed() -> bool:
        try:
            with connected(served, ssl.create_default_context(cafile=other["ssl_certfile"])):
                return True
        except ssl.SSLError:
            return False

    eventually(renewed)


def test_client_that_goes_away_ends_its_request(start_server: Start, pair: dict[str, str]) -> None:
    served = start_server(**pair)
    served.llm.hold_after = 1
    with connected(served, ssl.create_default_context(cafile=pair["ssl_certfile"])) as connection:
        connection.request("POST", "/v1/completions", json.dumps({"prompt": "a", "stream": True}), HEADERS)
        with connection.getresponse() as response:
            assert response.readline().startswith(b"data: ")
    eventually(lambda: served.llm.aborted)
    assert served.stop() == 0


def test_server_stops_in_the_moment_in_which_a_client_goes_away(
    start_server: Start, pair: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The protocol of HTTP is told in the next turn of the event loop that a connection with TLS has ended."""
    ended: list[BaseException | None] = []
    lose = Encrypted.connection_lost

    def stop_then(encrypted: Encrypted, exc: Exception | None) -> None:
        lose(encrypted, exc)
        try:
            served.http._connections.finish_all()
        except AttributeError as error:
            ended.append(error)
        else:
            ended.append(None)

    monkeypatch.setattr(Encrypted, "connection_lost", stop_then)
    served = start_server(**pair)
    with connected(served, ssl.create_default_context(cafile=pair["ssl_certfile"])) as connection:
        assert answer(connection)[0] == 200
    eventually(lambda: ended)
    assert ended == [None]
    assert served.stop() == 0


def test_the_first_request_behind_a_handshake_is_answered_by_a_server_that_stops(
    start_server: Start, pair: dict[str, str]
) -> None:
    served = start_server(**pair)
    with connected(served, ssl.create_default_context(cafile=pair["ssl_certfile"])) as connection:
        eventually(lambda: any(isinstance(each, HttpProtocol) for each in list(served.http._connections._open)))
        served.on_loop(served.signals.stop)
        eventually(lambda: served.http._listener.fileno() < 0)  # new ones are refused, and idle ones have been closed
        time.sleep(0.1)
        assert answer(connection)[0] == 200
    assert served.join() == 0


def stalled(served: Served, stack: ExitStack) -> socket.socket:
    """A connection that says nothing, until the stack is closed."""
    return stack.enter_context(socket.create_connection(("127.0.0.1", urlsplit(served.url).port or 0), timeout=10))


def test_connections_whose_handshake_stalls_count_under_their_address(
    start_server: Start, pair: dict[str, str]
) -> None:
    served = start_server(**pair, max_connections_per_address=4)
    context = ssl.create_default_context(cafile=pair["ssl_certfile"])
    with ExitStack() as stack:
        first = [stalled(served, stack) for _ in range(4)]
        with connected(served, context) as connection:
            status, body = answer(connection)
            assert (status, json.loads(body)["error"]["code"]) == (429, "too_many_connections")
        beyond = [stalled(served, stack) for _ in range(100)]
        # of those beyond the limit, the oldest are closed for the next
        assert all(each.recv(1) == b"" for each in beyond[:30])
        first[0].sendall(b"GET / HTTP/1.1\r\n\r\n")  # which is no TLS
        first[1].close()

        def is_served() -> bool:
            with connected(served, context) as connection:
                return answer(connection)[0] == 200

        eventually(is_served)
        with connected(served, context), connected(served, context) as connection:
            assert answer(connection)[0] == 200
    with ExitStack() as stack:
        stalled(served, stack)
        assert served.stop() == 0


def test_connections_whose_handshake_does_not_come_in_time_are_closed(
    start_server: Start, pair: dict[str, str]
) -> None:
    served = start_server(**pair, max_connections_per_address=1, header_timeout_s=2.0)
    with ExitStack() as stack:
        assert stalled(served, stack).recv(1) == b""
    with connected(served, ssl.create_default_context(cafile=pair["ssl_certfile"])) as connection:
        assert answer(connection)[0] == 200


def test_a_request_in_one_packet_with_the_end_of_the_handshake_is_answered(
    start_server: Start, pair: dict[str, str]
) -> None:
    served = start_server(**pair)
    arrived, to_send = ssl.MemoryBIO(), ssl.MemoryBIO()
    context = ssl.create_default_context(cafile=pair["ssl_certfile"])
    tls = context.wrap_bio(arrived, to_send, server_hostname="127.0.0.1")
    with ExitStack() as stack:
        connection = stalled(served, stack)
        while True:
            try:
                tls.do_handshake()
                break
            except ssl.SSLWantReadError:
                if to_send.pending:
                    connection.sendall(to_send.read())
                arrived.write(connection.recv(1 << 16))
        tls.write(b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n")
        connection.sendall(to_send.read())
        while True:
            arrived.write(connection.recv(1 << 16))
            try:
                assert tls.read(12) == b"HTTP/1.1 200"
                break
            except ssl.SSLWantReadError:
                continue


def test_certificates_of_clients_are_needed_where_that_is_said(start_server: Start, pair: dict[str, str]) -> None:
    served = start_server(**pair, ssl_ca_certs=pair["ssl_certfile"], ssl_cert_reqs=2)
    context = ssl.create_default_context(cafile=pair["ssl_certfile"])
    with pytest.raises((ssl.SSLError, ConnectionError)), connected(served, context) as connection:
        answer(connection)
    context.load_cert_chain(pair["ssl_certfile"], pair["ssl_keyfile"])
    with connected(served, context) as connection:
        assert answer(connection)[0] == 200


def test_files_that_are_no_pair_are_an_error_at_the_start(tmp_path: Path, pair: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="cert.pem cannot be used: .*; give ssl_keyfile, too"):
        tls_context(ServerArgs(ssl_certfile=pair["ssl_certfile"]))
    (tmp_path / "other").write_text("no key")
    for wrong in (str(tmp_path / "other"), str(tmp_path / "none")):
        with pytest.raises(ConfigError, match=f"ssl_keyfile {wrong} cannot be used.*give PEM"):
            tls_context(ServerArgs(**{**pair, "ssl_keyfile": wrong}))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="ssl_keyfile needs ssl_certfile"):
        ServerArgs(ssl_keyfile=pair["ssl_keyfile"])
    with pytest.raises(ConfigError, match="ssl_cert_reqs needs ssl_ca_certs"):
        ServerArgs(ssl_certfile=pair["ssl_certfile"], ssl_cert_reqs=2)


class UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=100)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.connect(self._path)


@pytest.fixture
def path(tmp_path: Path) -> Iterator[str]:
    """A path that is short enough for a socket: names in the working directory are."""
    with chdir(tmp_path):
        yield "octavo.sock"


def test_unix_socket_serves_and_is_removed(start_server: Start, path: str) -> None:
    served = start_server(uds=path)
    assert served.url == f"unix:{path}"
    first = UnixConnection(path)
    assert answer(first)[0] == 200
    first.close()
    served.llm.hold_after = 1
    half = UnixConnection(path)
    half.request("POST", "/v1/completions", json.dumps({"prompt": "a", "stream": True}), HEADERS)
    half.sock.shutdown(socket.SHUT_WR)
    sock = half.sock
    with half.getresponse() as response:
        assert response.readline().startswith(b"data: ")
        assert not served.llm.aborted
    sock.close()
    half.close()
    eventually(lambda: served.llm.aborted)
    with (
        pytest.raises(ConfigError, match=r"cannot listen on uds octavo\.sock: another process listens on it"),
        listening(served.args),
    ):
        pass
    assert served.stop() == 0
    assert not Path(path).exists()


def test_socket_that_a_dead_server_left_is_replaced_and_nothing_else_is(path: str) -> None:
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(path)
    with listening(ServerArgs(uds=path)):
        assert Path(path).is_socket()
    Path(path).write_text("a file")
    with pytest.raises(ConfigError, match="choose another path"), listening(ServerArgs(uds=path)):
        pass
    assert Path(path).read_text() == "a file"
