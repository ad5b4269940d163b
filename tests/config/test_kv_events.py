"""What may be set about KV events over ZeroMQ, and what is refused by name."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

from octavo.config.args import EngineArgs
from octavo.config.kv_events import check_kv_events, kv_events_config
from octavo.core.block_events import KvEventsConfig
from octavo.errors import ConfigError

ON = {"enable_kv_cache_events": True}


def test_nothing_is_published_unless_it_is_asked_for() -> None:
    off = {"enable_kv_cache_events": False, "endpoint": "tcp://*:5557"}
    for given in ({}, off, {"publisher": "null"}, {**ON, "publisher": "null"}):
        assert kv_events_config(given) is None
    assert kv_events_config({**ON, "topic": "kv@a"}) == KvEventsConfig(enable_kv_cache_events=True, topic="kv@a")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"enabled": True},
            "kv_events_config has the unknown field 'enabled', expected some of enable_kv_cache_events",
        ),
        (
            {"endpoint": "tcp://*:5557"},
            "has endpoint, but nothing is published without enable_kv_cache_events; set it to",
        ),
        ({**ON, "hwm": 0}, "kv_events_config: hwm is 0, expected `int` >= 1"),
        ({**ON, "publisher": "nats"}, "kv_events_config: publisher is 'nats', invalid enum value"),
        ({**ON, "endpoint": "5557"}, "kv_events_config: endpoint is '5557', expected tcp://HOST:PORT or ipc://PATH"),
        ({**ON, "endpoint": "tcp://*"}, "endpoint is 'tcp://\\*', expected"),
        ({**ON, "replay_endpoint": "http://a:1"}, "replay_endpoint is 'http://a:1', expected"),
    ],
)
def test_wrong_fields_are_named(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        kv_events_config(given)


@pytest.mark.parametrize(
    ("given", "num_replicas", "message"),
    [
        ({"endpoint": "tcp://*:0"}, 1, "endpoint is 'tcp://\\*:0', whose port must be 1 to 65535"),
        ({"endpoint": "tcp://*:65536"}, 1, "endpoint is 'tcp://\\*:65536', whose port must be 1 to 65535"),
        ({"replay_endpoint": "tcp://*:65535"}, 2, "replay_endpoint is .* must be 1 to 65534: the 2 replicas"),
        ({"replay_endpoint": "tcp://*:5557"}, 1, "are 5557 and 5557, must be at least 1 apart"),
        ({"replay_endpoint": "tcp://*:5558"}, 2, "are 5557 and 5558, must be at least 2 apart"),
    ],
)
def test_each_replica_needs_ports_of_its_own(given: dict[str, Any], num_replicas: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_kv_events(EngineArgs(kv_events_config={**ON, **given}, data_parallel_size=num_replicas))


def test_ports_of_others_may_be_the_same() -> None:
    given = {**ON, "endpoint": "tcp://router:5557", "replay_endpoint": "tcp://*:5557"}
    check_kv_events(EngineArgs(kv_events_config=given))


def test_what_it_needs_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="no effect without enable_prefix_caching"):
        check_kv_events(EngineArgs(kv_events_config=ON, enable_prefix_caching=False))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'octavo\[zmq\]'"):
        check_kv_events(EngineArgs(kv_events_config=ON))
    check_kv_events(EngineArgs())
