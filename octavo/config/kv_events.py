"""`kv_events_config`: where KV events are published over ZeroMQ, with vLLM's names."""

from __future__ import annotations

import importlib.util
import re
from typing import TYPE_CHECKING, Final

from octavo.config.json_options import read_option
from octavo.core.block_events import KvEventsConfig
from octavo.errors import ConfigError

if TYPE_CHECKING:
    from octavo.config.args import EngineArgs

_LAST_PORT: Final = 65535
_ENDPOINT: Final = re.compile(r"tcp://.*:[0-9]{1,5}|(ipc|inproc)://.*")


def check_kv_events(args: EngineArgs) -> None:
    """Raise ConfigError where `kv_events_config` cannot be followed."""
    config = kv_events_config(args.kv_events_config)
    if config is None:
        return
    if not args.enable_prefix_caching:
        raise ConfigError(
            "kv_events_config has no effect without enable_prefix_caching; enable it, or leave kv_events_config out"
        )
    _check_ports(config, args.prefill + args.decode or args.data_parallel_size)
    if importlib.util.find_spec("zmq") is None:
        raise ConfigError("kv_events_config needs the extra zmq: pip install 'octavo[zmq]'")


def kv_events_config(given: dict[str, object]) -> KvEventsConfig | None:
    """Return where events are published; None for nowhere. Raises ConfigError with the field, its value and what it
    may be."""
    config = read_option("kv_events_config", given, KvEventsConfig)
    if given and config.publisher != "null" and "enable_kv_cache_events" not in given:
        raise ConfigError(
            f"kv_events_config has {', '.join(given)}, but nothing is published without enable_kv_cache_events; set it "
            "to true, or to false to publish nothing"
        )
    if not config.is_on:
        return None
    for name in ("endpoint", "replay_endpoint"):
        place = getattr(config, name)
        if place is not None and not _is_endpoint(place):
            raise ConfigError(f"kv_events_config: {name} is {place!r:.80}, expected tcp://HOST:PORT or ipc://PATH")
    return config


def _check_ports(config: KvEventsConfig, num_replicas: int) -> None:
    """Raise ConfigError where a replica has no port, or that of another one: replica n adds n to the ports."""
    places = {"endpoint": config.endpoint, "replay_endpoint": config.replay_endpoint or ""}
    ports = {name: int(each.rpartition(":")[2]) for name, each in places.items() if each.startswith("tcp://")}
    last = _LAST_PORT - num_replicas + 1
    for name, port in ports.items():
        if not 0 < port <= last:
            raise ConfigError(
                f"kv_events_config: {name} is {places[name]!r:.80}, whose port must be 1 to {last}: the "
                f"{num_replicas} replicas use this port and the next ones"
            )
    listens = all("*" in each or "::" in each for each in places.values())
    if listens and len(ports) == 2 and abs(ports["endpoint"] - ports["replay_endpoint"]) < num_replicas:
        raise ConfigError(
            f"kv_events_config: the ports of endpoint and replay_endpoint are {ports['endpoint']} and "
            f"{ports['replay_endpoint']}, must be at least {num_replicas} apart: the {num_replicas} replicas "
            "use these ports and the next ones"
        )


def _is_endpoint(place: str) -> bool:
    return _ENDPOINT.fullmatch(place) is not None
