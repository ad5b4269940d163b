"""Whose connections count together, and as whose."""

from __future__ import annotations

import pytest

from octavo.config.server_args import ServerArgs
from octavo.errors import ConfigError
from octavo.server.http.connections import Connections, counted_address


@pytest.mark.parametrize(
    ("first", "second", "is_one"),
    [
        ("1.2.3.4", "1.2.3.4", True),
        ("1.2.3.4", "1.2.3.5", False),
        ("::ffff:1.2.3.4", "1.2.3.4", True),
        ("2001:db8::1", "2001:db8::ffff:2", True),
        ("2001:db8::1", "2001:db8:0:1::1", False),
        ("fe80::1%eth0", "fe80::2%eth0", True),
        ("", "", True),
    ],
)
def test_addresses_count_together_when_they_are_one_clients(first: str, second: str, is_one: bool) -> None:
    assert (counted_address(first) == counted_address(second)) == is_one


def test_limits_hold_per_address_and_over_all_until_a_release() -> None:
    connections = Connections(ServerArgs(max_connections_per_address=2), max_connections=3)
    assert [connections.refusal("1.1.1.1") is None for _ in range(3)] == [True, True, False]
    assert connections.refusal("2.2.2.2") is None
    full = connections.refusal("3.3.3.3")
    assert full is not None
    assert (full.status, full.code) == (503, "too_many_connections")
    connections.release("1.1.1.1")
    assert connections.refusal("3.3.3.3") is None


@pytest.mark.parametrize(
    ("values", "client"),
    [
        (["9.9.9.9"], "9.9.9.9"),
        (["9.9.9.9, 8.8.8.8"], "8.8.8.8"),
        (["9.9.9.9, 10.0.0.1"], "9.9.9.9"),
        (["9.9.9.9", "8.8.8.8, 10.0.0.1,10.9.9.9"], "8.8.8.8"),
        (["9.9.9.9, unknown"], "9.9.9.9"),
        (["2001:db8::1"], "2001:db8::1"),
        (["\xff"], "10.0.0.2"),
        (["9.9.9.9" + ",x" * 31], "9.9.9.9"),
        (["9.9.9.9" + ",x" * 32], "10.0.0.2"),
        ([], "10.0.0.2"),
    ],
)
def test_client_behind_proxies_is_the_last_address_that_is_none_of_them(values: list[str], client: str) -> None:
    connections = Connections(ServerArgs(trusted_proxies=("10.0.0.0/8",)))
    assert connections.is_proxy("10.0.0.2")
    assert not connections.is_proxy("9.9.9.9")
    headers = [(b"x-forwarded-for", value.encode("latin-1")) for value in values]
    assert connections.forwarded_address(headers, "10.0.0.2") == client


def test_what_is_thrown_away_is_read_at_one_pace_for_all_connections() -> None:
    connections = Connections(ServerArgs())
    first, second, third = (connections.next_discard_s(now=100.0) for _ in range(3))
    assert 0 < first < second < third
    assert connections.next_discard_s(now=200.0) == first


def test_proxies_and_sizes_are_checked_by_name() -> None:
    with pytest.raises(ConfigError, match=r"trusted_proxies: 'proxy\.example' does not appear to be"):
        ServerArgs(trusted_proxies=("10.0.0.0/8", "proxy.example"))
    with pytest.raises(ConfigError, match=r"max_bodies_size is 10, must be at least max_body_size \(11\)"):
        ServerArgs(max_bodies_size=10, max_body_size=11)
