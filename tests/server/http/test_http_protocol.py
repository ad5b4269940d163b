"""What a connection may take before its request is known, by raw sockets, and how it ends."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any
from urllib.parse import urlsplit

import pytest

from octavo.server.http import http_protocol
from tests.server.conftest import Served
from tests.server.raw import ask, eventually

Start = Callable[..., Served]
HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\n"
POST = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


@contextmanager
def opened(url: str) -> Iterator[socket.socket]:
    parts = urlsplit(url)
    with socket.create_connection((str(parts.hostname), parts.port or 0), timeout=100) as connection:
        yield connection


def answer(connection: socket.socket) -> tuple[int, dict[str, Any]]:
    """Status and error object (or body) of the next response, read without a byte of the one after it."""
    head = b""
    while not head.endswith(b"\r\n\r\n"):
        byte = connection.recv(1)
        assert byte, head
        head += byte
    status_line, *lines = head.decode().split("\r\n")[:-2]
    headers = dict(line.lower().split(": ", 1) for line in lines)
    body = b""
    while len(body) < int(headers["content-length"]):
        body += connection.recv(int(headers["content-length"]) - len(body))
    status = int(status_line.split()[1])
    if status == 200:
        return status, json.loads(body) if body else {}
    assert headers["content-type"] == "application/json"
    error: dict[str, Any] = json.loads(body)["error"]
    return status, error


def is_closed(connection: socket.socket) -> bool:
    """Nothing more comes."""
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


def completion(**fields: Any) -> bytes:
    body = json.dumps({"prompt": "a", "max_tokens": 3, **fields}).encode()
    return POST + b"Content-Length: %d\r\n\r\n%s" % (len(body), body)


def send_without_end(connection: socket.socket, start: bytes, piece: bytes, most_bytes: int) -> int:
    """Send until the server has closed its side, or `most_bytes`; returns how many were sent."""
    num_bytes = 0
    try:
        connection.sendall(start)
        while num_bytes < most_bytes:
            connection.sendall(piece)
            num_bytes += len(piece)
    except (BrokenPipeError, ConnectionResetError):
        pass
    return num_bytes


# Limits of headers.


@pytest.mark.parametrize(
    ("start", "piece", "status", "code"),
    [
        (HEALTH + b"X-A: ", b"a" * 4096, 431, "headers_too_large"),
        (HEALTH, b"X-A: " + b"a" * 1000 + b"\r\n", 431, "headers_too_large"),
        (HEALTH, b"a: b\r\n" * 100, 431, "headers_too_large"),
        (HEALTH, b"a" * 4096, 431, "headers_too_large"),
        (b"GET /", b"a" * 4096, 414, "url_too_long"),
        (POST + b"Transfer-Encoding: chunked\r\n\r\n0\r\nX-A: ", b"a" * 4096, 431, "headers_too_large"),
        (POST + b"Transfer-Encoding: chunked\r\n\r\n0\r\n", b"a: b\r\n" * 500, 431, "headers_too_large"),
        (POST + b"Transfer-Encoding: chunked\r\n\r\n1;a=", b"a" * 4096, 431, "headers_too_large"),
    ],
)
def test_headers_without_end_are_refused_without_a_key(
    start_server: Start, start: bytes, piece: bytes, status: int, code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_protocol, "_MOST_DISCARDED_BYTES", 1 << 20)  # bytes are read at a limited rate
    server = start_server(api_key=("k",))
    with opened(server.url) as connection:
        connection.sendall(start)
        connection.sendall(piece * (1 + 300_000 // len(piece)))
        if start.startswith(POST):
            assert answer(connection)[0] == 401  # this client has no key, and is told so before anything else
        else:
            found, error = answer(connection)
            assert (found, error["code"]) == (status, code)
        # the rest is thrown away for a moment, then the connection ends
        assert send_without_end(connection, b"", piece * 100, 1 << 30) < 1 << 30


def test_body_of_a_client_with_a_key_has_limits_between_its_chunks(start_server: Start) -> None:
    server = start_server(api_key=("k",))
    start = POST + b"Authorization: Bearer k\r\nTransfer-Encoding: chunked\r\n\r\n"
    for part in (b"0\r\nX-A: ", b"1;a="):
        with opened(server.url) as connection:
            connection.sendall(start + part + b"a" * 300_000)
            assert answer(connection)[1]["code"] == "headers_too_large"


def test_body_in_many_tiny_chunks_is_refused(start_server: Start) -> None:
    """A chunk takes time however small it is; 40,000 in one packet stopped the loop for 100 ms."""
    server = start_server(api_key=("k",))
    start = POST + b"Authorization: Bearer k\r\nTransfer-Encoding: chunked\r\n\r\n"
    with opened(server.url) as connection:
        send_without_end(connection, start, b"1\r\n \r\n" * 1000, 600_000)
        assert answer(connection)[1]["code"] == "chunks_too_small"
    body = completion().partition(b"\r\n\r\n")[2]
    tiny = b"".join(b"1\r\n%c\r\n" % byte for byte in b" " * 3000 + body)
    with opened(server.url) as connection:
        connection.sendall(start + tiny + b"0\r\n\r\n")
        assert answer(connection)[0] == 200


def test_headers_up_to_the_limit_pass_in_one_piece_and_in_many(server: Served, start_server: Start) -> None:
    value = b"X-A: " + b"a" * 60_000 + b"\r\n\r\n"
    with opened(server.url) as connection:
        connection.sendall(HEALTH + value)
        assert answer(connection)[0] == 200
        for start in range(0, len(HEALTH + value), 500):
            connection.sendall((HEALTH + value)[start : start + 500])
        assert answer(connection)[0] == 200
    smaller = start_server(max_header_size=300)
    with opened(smaller.url) as connection:
        connection.sendall(HEALTH + b"X-A: " + b"a" * 200 + b"\r\n\r\n")
        assert answer(connection)[0] == 200
        connection.sendall(HEALTH + b"X-A: " + b"a" * 300 + b"\r\n\r\n")
        status, error = answer(connection)
        assert (status, error["code"]) == (431, "headers_too_large")
        assert "300 bytes" in error["message"]


def test_trailers_are_no_headers(start_server: Start) -> None:
    server = start_server(api_key=("k",))
    with opened(server.url) as connection:
        connection.sendall(POST + b"Transfer-Encoding: chunked\r\n\r\n0\r\nAuthorization: Bearer k\r\n\r\n")
        assert answer(connection)[0] == 401


# What is not HTTP.


@pytest.mark.parametrize(
    "sent",
    [
        b"this is not HTTP\r\n\r\n",
        b"GET\r\n\r\n",
        b"GET /health HTTP/9.9\r\n\r\n",
        b"GET /health HTTP/1.1\r\nno colon\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        POST + b"Content-Length: 3\r\nContent-Length: 4\r\n\r\nabc",
        POST + b"Content-Length: -1\r\n\r\n",
        POST + b"Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        POST + b"Transfer-Encoding: chunked\r\n\r\nz\r\n",
    ],
)
def test_what_is_not_http_is_refused_in_json(server: Served, sent: bytes) -> None:
    with opened(server.url) as connection:
        connection.sendall(sent)
        status, error = answer(connection)
        assert (status, error["type"], error["code"]) == (400, "invalid_request_error", "invalid_http")
        assert is_closed(connection)


def test_errors_of_the_parser_do_not_get_into_an_answer_that_is_under_way(server: Served) -> None:
    server.llm.token_interval_s = 0.02
    with opened(server.url) as connection:
        connection.sendall(completion() + completion() + b"nonsense\r\n\r\n")
        assert [answer(connection)[0] for _ in range(2)] == [200, 200]
        assert is_closed(connection)


def test_requests_ahead_of_their_answers_are_bounded(server: Served) -> None:
    with opened(server.url) as connection:
        connection.sendall((HEALTH + b"\r\n") * 1000)
        connection.shutdown(socket.SHUT_WR)
        received = b"".join(iter(lambda: connection.recv(1 << 16), b""))
    assert 1 <= received.count(b"HTTP/1.1 200") <= 20


# What has no meaning here.

UPGRADE = POST + b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEAAEAAAAIAAAAA\r\n"


@pytest.mark.parametrize(
    "sent",
    [
        completion().replace(POST, UPGRADE),
        UPGRADE + b"Transfer-Encoding: chunked\r\n\r\n8\r\n" + b'{"prompt\r\na\r\n": "a"' + b"   }\r\n0\r\n\r\n",
        HEALTH + b"Connection: Upgrade\r\nUpgrade: websocket\r\n\r\n",
    ],
)
def test_requests_that_would_change_the_protocol_are_served_as_they_are(server: Served, sent: bytes) -> None:
    with opened(server.url) as connection:
        connection.sendall(sent + sent + HEALTH + b"\r\n")
        assert [answer(connection)[0] for _ in range(3)] == [200, 200, 200]
        for byte in range(len(sent)):
            connection.sendall(sent[byte : byte + 1])
        assert answer(connection)[0] == 200


def test_old_clients_get_no_chunks(server: Served) -> None:
    old = completion(stream=True).replace(b"HTTP/1.1", b"HTTP/1.0").replace(b"\r\n", b"\r\nExpect: 100-continue\r\n", 1)
    with opened(server.url) as connection:
        connection.sendall(old)
        received = b"".join(iter(lambda: connection.recv(1 << 16), b""))
    head, _, body = received.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 OK\r\n")
    assert b"transfer-encoding" not in head
    assert body.startswith(b"data: {")
    assert body.endswith(b"}\n\ndata: [DONE]\n\n")


# Deadlines.


def test_headers_have_a_deadline(start_server: Start) -> None:
    server = start_server(header_timeout_s=1.0)
    with opened(server.url) as silent, opened(server.url) as half, opened(server.url) as second:
        half.sendall(HEALTH)
        second.sendall(HEALTH + b"\r\n" + HEALTH)
        assert is_closed(silent)
        assert answer(half)[1]["code"] == "request_timeout"
        assert answer(second)[0] == 200
        assert answer(second)[0] == 408


def test_bodies_have_a_deadline_however_slowly_they_drip(start_server: Start) -> None:
    server = start_server(body_timeout_s=0.3)
    with opened(server.url) as connection:
        connection.sendall(POST + b"Content-Length: 1000\r\n\r\n")
        connection.settimeout(0.02)
        started_at = time.monotonic()
        while time.monotonic() - started_at < 100:
            connection.sendall(b" ")
            try:
                connection.recv(1, socket.MSG_PEEK)
            except TimeoutError:
                continue
            break
        connection.settimeout(100)
        status, error = answer(connection)
        assert (status, error["code"]) == (408, "request_timeout")


def test_idle_connections_stay_open_longer_than_headers_may_take(start_server: Start) -> None:
    server = start_server(header_timeout_s=0.6)
    with opened(server.url) as connection:
        for idle_s in (0.8, 0.0):
            connection.sendall(HEALTH + b"\r\n")
            assert answer(connection)[0] == 200
            time.sleep(idle_s)


def test_body_is_not_read_before_the_key_is_checked(start_server: Start) -> None:
    server = start_server(api_key=("k",))
    with opened(server.url) as connection:
        connection.sendall(POST + b"Expect: 100-continue\r\nContent-Length: 1000000\r\n\r\n")
        assert answer(connection)[0] == 401


# Connections of an address.


def test_addresses_have_a_limit_of_connections_and_health_is_answered_beyond_it(start_server: Start) -> None:
    server = start_server(max_connections_per_address=2)
    with opened(server.url) as first, opened(server.url) as second:
        for connection in (first, second):
            connection.sendall(HEALTH + b"\r\n")
            assert answer(connection)[0] == 200
        refused = ask(server.url, "/v1/models")
        assert (refused.status, refused.error["code"]) == (429, "too_many_connections")
        assert refused.headers["retry-after"] == "1"
        assert "--max-connections-per-address" in refused.error["message"]
        for _ in range(100):  # more than there is room for beyond the limit
            health = ask(server.url, "/health")
            assert (health.status, health.headers["connection"]) == (200, "close")
        first.sendall(HEALTH + b"\r\n")
        assert answer(first)[0] == 200
    eventually(lambda: ask(server.url, "/v1/models").status == 200)


def test_silent_connections_beyond_the_limit_do_not_keep_health_away(start_server: Start) -> None:
    server = start_server(max_connections_per_address=1)
    with ExitStack() as stack:
        silent = [stack.enter_context(opened(server.url)) for _ in range(200)]
        assert ask(server.url, "/health").status == 200
        assert is_closed(silent[1])  # the oldest beyond the limit


def test_requests_of_a_trusted_proxy_count_for_the_client_that_it_names(start_server: Start) -> None:
    server = start_server(max_connections_per_address=2, trusted_proxies=("127.0.0.0/8",))
    server.llm.hold_after = 1
    client = b"X-Forwarded-For: 1.1.1.1, 5.6.7.8, 127.0.0.9\r\n"
    with ExitStack() as stack:
        held = [stack.enter_context(opened(server.url)) for _ in range(2)]
        for connection in held:
            connection.sendall(completion(stream=True).replace(b"\r\n", b"\r\n" + client, 1))
        eventually(lambda: len(server.llm.requests) == 2)
        names = {"X-Forwarded-For": "5.6.7.8"}
        assert ask(server.url, "/v1/models", headers=names).error["code"] == "too_many_connections"
        assert ask(server.url, "/health", headers=names).status == 200
        assert ask(server.url, "/v1/models", headers={"X-Forwarded-For": "5.6.7.8, 9.9.9.9"}).status == 200
        assert ask(server.url, "/v1/models").status == 200
    eventually(lambda: ask(server.url, "/v1/models", headers=names).status == 200)


def test_last_answer_is_not_lost_to_what_the_client_still_sends(start_server: Start) -> None:
    server = start_server(max_body_size=1000)
    for _ in range(5):
        with opened(server.url) as connection:
            connection.sendall(POST + b"Content-Length: 8000000\r\n\r\n" + b" " * 8_000_000)
            time.sleep(0.05)  # in which a reset would arrive, and take the answer away
            status, error = answer(connection)
            assert (status, error["code"]) == (413, "request_body_too_large")


# Half-closed clients.


@pytest.mark.parametrize("version", [b"HTTP/1.1", b"HTTP/1.0"])
@pytest.mark.parametrize("stream", [False, True])
def test_client_that_has_shut_down_its_side_gets_its_answer(server: Served, stream: bool, version: bytes) -> None:
    server.llm.token_interval_s = 0.1
    with opened(server.url) as connection:
        connection.sendall(completion(stream=stream).replace(b"HTTP/1.1", version, 1))
        connection.shutdown(socket.SHUT_WR)
        received = b"".join(iter(lambda: connection.recv(1 << 16), b""))
    assert b" 200 OK\r\n" in received
    assert (b"[DONE]" if stream else b'"completion_tokens":3') in received
    assert (b"100 Continue" in received) == (version == b"HTTP/1.1")
    assert (b"chunked" in received) == (stream and version == b"HTTP/1.1")
    assert server.llm.aborted == []


def test_all_requests_before_the_shutdown_are_answered(server: Served) -> None:
    server.llm.token_interval_s = 0.02
    with opened(server.url) as connection:
        connection.sendall(completion() * 3)
        connection.shutdown(socket.SHUT_WR)
        received = b"".join(iter(lambda: connection.recv(1 << 16), b""))
    assert received.count(b" 200 OK\r\n") == 3


def test_client_that_shuts_down_its_side_in_a_stream_gets_the_rest(server: Served) -> None:
    server.llm.token_interval_s = 0.1
    with opened(server.url) as connection:
        connection.sendall(completion(stream=True))
        received = connection.recv(1 << 16)
        connection.shutdown(socket.SHUT_WR)
        received += b"".join(iter(lambda: connection.recv(1 << 16), b""))
    assert b"[DONE]" in received
    assert b"\r\n:\n\n\r\n" in received


def test_a_client_that_closes_an_idle_stream_ends_its_request(server: Served) -> None:
    server.llm.hold_after = 1
    with opened(server.url) as connection:
        connection.sendall(completion(stream=True))
        received = b""
        while b"data: " not in received:
            received += connection.recv(1 << 16)
        eventually(lambda: server.llm.num_outputs == 1)
        connection.setblocking(False)
        with suppress(BlockingIOError):
            connection.recv(1 << 16)  # so that the end is a plain FIN
    eventually(lambda: server.llm.aborted)


@pytest.mark.parametrize(
    "second",
    [completion(), *(POST + b"Content-Length: %d\r\n\r\n" % size + b" " * (size - 1) for size in (100, 10**5))],
)
def test_client_that_leaves_with_or_within_a_second_request_ends_the_first(server: Served, second: bytes) -> None:
    server.llm.hold_after = 1
    with opened(server.url) as connection:
        connection.sendall(completion())
        eventually(lambda: server.llm.requests)
        connection.sendall(second)
        time.sleep(0.2)
    eventually(lambda: len(server.llm.aborted) == 1)


# The end of a server.


def test_connections_without_a_request_do_not_hold_up_the_end(start_server: Start) -> None:
    server = start_server(shutdown_timeout_s=3600.0, header_timeout_s=3600.0)
    with ExitStack() as stack:
        connections = [stack.enter_context(opened(server.url)) for _ in range(20)]
        for connection in connections[:10]:
            connection.sendall(HEALTH + b"\r\n")
            assert answer(connection)[0] == 200
        for connection in connections[15:]:
            connection.sendall(HEALTH)
        eventually(lambda: ask(server.url, "/health").status == 200)
        assert server.stop() == 0
        for connection in connections[15:]:
            assert answer(connection)[1]["code"] == "server_shutting_down"
        assert all(is_closed(connection) for connection in connections)


def test_a_refused_client_that_stays_does_not_hold_up_the_end(
    start_server: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_protocol, "_LINGER_S", 100.0)
    server = start_server(shutdown_timeout_s=3600.0)
    with opened(server.url) as connection:
        connection.sendall(b"no HTTP\r\n\r\n")
        assert answer(connection)[0] == 400
        started = time.monotonic()
        assert server.stop() == 0
        assert time.monotonic() - started < http_protocol._LINGER_S


def test_every_connection_open_at_shutdown_gets_an_answer(start_server: Start) -> None:
    for _ in range(3):
        server = start_server(shutdown_timeout_s=100.0)
        outcomes: Counter[str] = Counter()

        def client(url: str, outcomes: Counter[str]) -> None:
            while True:
                try:
                    with opened(url) as connection:
                        connection.sendall(completion(max_tokens=1))
                        outcomes[str(answer(connection)[0])] += 1
                except ConnectionRefusedError:
                    return  # it never had a connection
                except Exception as error:
                    outcomes[repr(error)] += 1

        clients = [threading.Thread(target=client, args=(server.url, outcomes)) for _ in range(8)]
        for each in clients:
            each.start()
        eventually(lambda seen=outcomes: seen["200"] > 20)
        assert server.stop() == 0
        for each in clients:
            each.join()
        assert set(outcomes) == {"200"}, outcomes


def test_health_is_answered_while_other_requests_wait_to_be_started(
    start_server: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = start_server()
    with monkeypatch.context() as patched, opened(server.url) as waiting, opened(server.url) as checking:
        starts = server.http._connections.starts
        patched.setattr(starts, "_most", 0)
        waiting.sendall(b"GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n")
        eventually(lambda: len(starts._waiting) == 1)
        checking.sendall(HEALTH + b"\r\n")
        assert answer(checking)[0] == 200
        patched.undo()
        server.on_loop(starts._next_turn, server.loop)
        assert answer(waiting)[0] == 200


def test_who_connects_while_the_event_loop_is_busy_is_accepted_in_few_turns_of_it(start_server: Start) -> None:
    server, num_clients = start_server(), 40
    is_idle, is_done, num_turns = threading.Event(), threading.Event(), list[int]()
    accepted = server.http._connections._open

    def count(turns: int = 0) -> None:
        if len(accepted) < num_clients:
            server.loop.call_soon(count, turns + 1)
        else:
            num_turns.append(turns)
            is_done.set()

    server.on_loop(is_idle.wait, 100)
    with ExitStack() as stack:
        for _ in range(num_clients):
            stack.enter_context(opened(server.url))
        server.on_loop(count)
        is_idle.set()
        assert is_done.wait(100)
    assert num_turns[0] < num_clients // 2
