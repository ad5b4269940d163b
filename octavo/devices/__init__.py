"""The devices that a model can run on: one folder each, and one line each in `DEVICES`.

This file imports no torch, because the configuration reads the names. Used by config (names), worker and cli.
"""

from __future__ import annotations

from typing import Final

DEVICES: Final[dict[str, str]] = {
    "cuda": "octavo.devices.cuda.device.CudaDevice",
    "cpu": "octavo.devices.cpu.device.CpuDevice",
    "reference": "octavo.devices.reference.device.ReferenceDevice",
}
"""Name of a device → the class that implements `octavo.devices.device.Device`. `auto` takes the first that can run."""
