"""`kv_events_config`: where KV events are published over ZeroMQ, with vLLM's names."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

from octavo.config.json_options import read_option
from octavo.core.block_events import KvEventsConfig
from octavo.errors import ConfigError

if TYPE_CHECKING:
    from octavo.config.args import EngineArgs

_SCHEMES = ("tcp://", "ipc://", "inproc://")


def check_kv_events(args: EngineArgs) -> None:
    """Raise ConfigError where `kv_events_config` cannot be followed."""
    config = kv_events_config(args.kv_events_config)
    if config is None:
        return
    if not args.enable_prefix_caching:
        raise ConfigError(
            "kv_events_config has no effect without enable_prefix_caching; enable it, or leave kv_events_config out"
        )
    if importlib.util.find_spec("zmq") is None:
        raise ConfigError("kv_events_config needs the extra zmq: pip install 'octavo[zmq]'")


def kv_events_config(given: dict[str, object]) -> KvEventsConfig | None:
    """Return where events are published; None for nowhere. Raises ConfigError with the field, its value and what it
    may be."""
    config = read_option("kv_events_config", given, KvEventsConfig)
    if not config.is_on:
        return None
    for name in ("endpoint", "replay_endpoint"):
        place = getattr(config, name)
        if place is not None and not _is_endpoint(place):
            raise ConfigError(f"kv_events_config: {name} is {place!r:.80}, expected tcp://HOST:PORT or ipc://PATH")
    return config


def _is_endpoint(place: str) -> bool:
    port = place.rpartition(":")[2]
    return place.startswith(_SCHEMES) and (not place.startswith("tcp://") or (port.isdecimal() and len(port) < 6))
