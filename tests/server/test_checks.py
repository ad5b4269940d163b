"""What is refused for its headers: hosts, origins, types and encodings of bodies."""

from __future__ import annotations

import gzip
import json
import socket
from collections.abc import Callable
from functools import partial

import pytest

from octavo.server.checks import HeaderChecks, own_hosts
from octavo.server.errors import ApiError
from tests.server.conftest import Served
from tests.server.raw import ask, connect

Start = Callable[..., Served]
COMPLETION = {"prompt": "a", "max_tokens": 1}
COMMANDS = ["/reset_prefix_cache", "/pin_prefix", "/unpin_prefix"]


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8000", "localhost.evil.example", "127.0.0.1.evil"])
def test_names_of_others_are_refused_on_a_loopback_address(server: Served, host: str) -> None:
    for path, method in (("/v1/models", "GET"), ("/reset_prefix_cache", "POST")):
        answer = ask(server.url, path, method=method, headers={"Host": host})
        assert (answer.status, answer.error["code"]) == (403, "host_not_allowed")


@pytest.mark.parametrize(
    "host", ["localhost", "LOCALHOST:80", "a.localhost", "127.0.0.1:1", "[::1]:8000", "10.0.0.7", ""]
)
def test_own_names_and_addresses_pass(server: Served, host: str) -> None:
    assert ask(server.url, "/v1/models", headers={"Host": host}).status == 200


@pytest.mark.parametrize("host", ["evil@127.0.0.1", "127.0.0.1/evil", "127.0.0.1?", "127.0.0.1#", "a:b", "@", "["])
def test_what_is_no_host_is_refused_whatever_names_there_are(server: Served, start_server: Start, host: str) -> None:
    for url in (server.url, start_server(allow_hosts=("*",)).url):
        answer = ask(url, "/v1/models", headers={"Host": host})
        assert (answer.status, answer.error["code"]) == (400, "invalid_http")


@pytest.mark.parametrize(
    ("version", "hosts", "status"),
    [("1.1", [], 400), ("1.1", ["localhost", "localhost"], 400), ("1.0", ["a", "b"], 400), ("1.0", [], 200)],
)
def test_requests_name_one_host(server: Served, version: str, hosts: list[str], status: int) -> None:
    with connect(server.url) as connection:
        connection._http_vsn_str = f"HTTP/{version}"  # type: ignore[attr-defined]
        connection.putrequest("GET", "/v1/models", skip_host=True)
        for host in hosts:
            connection.putheader("Host", host)
        connection.endheaders()
        assert connection.getresponse().status == status


def test_machines_name_is_the_servers_and_named_hosts_replace_the_default(start_server: Start) -> None:
    assert own_hosts("127.0.0.1") == own_hosts("::1") == {"localhost", socket.gethostname().lower()}
    assert own_hosts("0.0.0.0") is own_hosts("llm.example") is own_hosts("") is None
    server = start_server(allow_hosts=("API.example",))
    assert ask(server.url, "/v1/models", headers={"Host": "api.example:443"}).status == 200
    assert ask(server.url, "/v1/models", headers={"Host": "localhost"}).status == 403
    assert ask(server.url, "/health", headers={"Host": "localhost"}).status == 200
    assert ask(start_server(allow_hosts=("*",)).url, "/v1/models", headers={"Host": "any"}).status == 200


@pytest.mark.parametrize("path", COMMANDS)
@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=a"])
def test_what_a_form_can_send_is_no_command(server: Served, path: str, kind: str) -> None:
    for body in (None, b"", b"{}"):
        answer = ask(server.url, path, body, method="POST", headers={"Content-Type": kind})
        assert (answer.status, answer.error["code"]) == (415, "invalid_content_type")


@pytest.mark.parametrize("origin", ["http://evil.example", "null", "http://localhost:1", ""])
def test_bodyless_commands_of_foreign_pages_are_refused(server: Served, origin: str) -> None:
    answer = ask(server.url, "/reset_prefix_cache", method="POST", headers={"Origin": origin})
    assert (answer.status, answer.error["code"]) == (403, "origin_not_allowed")


def test_commands_of_own_and_allowed_pages_and_of_programs_pass(server: Served, start_server: Start) -> None:
    assert ask(server.url, "/reset_prefix_cache", method="POST").status == 200
    assert ask(server.url, "/reset_prefix_cache", method="POST", headers={"Origin": server.url}).status == 200
    headers = {"Origin": "http://evil.example"}
    # the browser has asked before it sent this type
    assert ask(server.url, "/reset_prefix_cache", {}, headers=headers).status == 200
    for allowed in ("http://evil.example", "*"):
        open_server = start_server(allowed_origins=(allowed,))
        assert ask(open_server.url, "/reset_prefix_cache", method="POST", headers=headers).status == 200


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "br", "identity, gzip", "x"])
def test_compressed_bodies_are_refused_by_name(server: Served, encoding: str) -> None:
    body = gzip.compress(json.dumps(COMPLETION).encode())
    answer = ask(server.url, "/v1/completions", body, headers={"Content-Encoding": encoding})
    assert (answer.status, answer.error["code"]) == (415, "unsupported_content_encoding")
    assert encoding in answer.error["message"]
    assert answer.headers["accept-encoding"] == "identity"


def test_identity_is_no_compression(server: Served) -> None:
    assert ask(server.url, "/v1/completions", COMPLETION, headers={"Content-Encoding": "identity"}).status == 200


def test_each_refusal_is_an_error_of_its_own() -> None:
    """An exception that is raised again and again would keep the frames of all requests."""
    checks = HeaderChecks({"localhost"})
    refused = [partial(checks.check_host, "1.1", "/tokenize", {b"host": host}) for host in (b"other", b"@")]
    for check in (*refused, partial(checks.check, "POST", "/tokenize", {b"content-type": b"text/plain"})):
        with pytest.raises(ApiError) as first:
            check()
        with pytest.raises(ApiError) as second:
            check()
        assert first.value is not second.value
