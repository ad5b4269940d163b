"""The rates of accelerators: one JSON file per device, in `devices/` or from the user."""

from __future__ import annotations

from os.path import expanduser
from pathlib import Path
from typing import Annotated, Final

import msgspec

from octavo.errors import ConfigError, suggestion

_FOLDER: Final = Path(__file__).parent / "devices"
_ALIASES: Final = {"a100": "a100-80g"}

_Rate = Annotated[float, msgspec.Meta(gt=0)]
_Seconds = Annotated[float, msgspec.Meta(ge=0)]
_Share = Annotated[float, msgspec.Meta(gt=0, le=1)]


class DataSheet(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One device. Bytes, seconds, and operations a second as in its data sheet, without sparsity.

    bytes_per_s: rate of its memory. flops_per_s: in bfloat16. fp8_flops_per_s: left out if it has no 8-bit arithmetic.
    link_bytes_per_s: rate in one direction to the other devices of a host, which has devices_per_host. collective_s:
    least time of a collective, however small. network_bytes_per_s, network_s: rate and least time between hosts.
    channel_s: time to send the plan of a step to ranks. host_bytes_per_s: between device and host, in one direction.
    bandwidth_reached, arithmetic_reached: shares of the rates of memory and arithmetic that a serving engine reaches.
    source: origin of the figures.
    """

    name: str
    memory_bytes: _Rate
    bytes_per_s: _Rate
    flops_per_s: _Rate
    fp8_flops_per_s: _Rate | None = None
    link_bytes_per_s: _Rate | None = None
    collective_s: _Seconds = 10e-6
    devices_per_host: Annotated[int, msgspec.Meta(ge=1)] = 8
    network_bytes_per_s: _Rate = 50e9
    network_s: _Seconds = 25e-6
    channel_s: _Seconds = 100e-6
    host_bytes_per_s: _Rate = 20e9
    bandwidth_reached: _Share = 0.8
    arithmetic_reached: _Share = 0.5
    source: str = ""

    def link(self, num_devices: int) -> tuple[float, float]:
        """Return the latency in seconds and the bytes per second of a collective between so many devices."""
        if num_devices > self.devices_per_host:
            return self.network_s, self.network_bytes_per_s
        return self.collective_s, self.link_bytes_per_s or 1.0


def device_names() -> list[str]:
    """Return the names of the devices that ship with octavo."""
    return sorted([*(path.stem for path in _FOLDER.glob("*.json")), *_ALIASES])


def read_device(source: str) -> DataSheet:
    """Return the device of this name, or the one that a JSON file describes. Raises ConfigError."""
    path = Path(expanduser(source))
    if not path.is_file():
        path = _FOLDER / f"{_ALIASES.get(source, source)}.json"
        if source not in device_names():
            raise ConfigError(
                f"device is {source!r}, which is neither a file nor one of {', '.join(device_names())}"
                f"{suggestion(source, device_names())}"
            )
    try:
        return msgspec.json.decode(path.read_bytes(), type=DataSheet)
    except OSError as error:
        raise ConfigError(f"device is {source!r}, which cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(
            f"{source} does not describe a device: {error}; its fields are {', '.join(DataSheet.__struct_fields__)}"
        ) from error
