"""A device that says it has memory of its own, and measures what steps take of it: torch computes, on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from octavo.devices.device import DeviceMemory, MemoryUse
from octavo.devices.reference.device import ReferenceDevice

NAME = "tests.fakes.measured_device.MeasuredDevice"
"""For `DEVICES`."""


class MeasuredDevice(ReferenceDevice):
    """What it measures is what tests say. frees: what is free each time that somebody asks, the last one for ever.
    uses: what is taken each time, likewise."""

    warms_up = True
    rows_are_exact = True
    frees: ClassVar[list[int]] = []
    uses: ClassVar[list[MemoryUse]] = []
    num_released = 0

    def memory(self) -> DeviceMemory:
        free = self.frees.pop(0) if len(self.frees) > 1 else self.frees[0]
        return DeviceMemory(4 << 30, free, "device", is_host=False, host_available=1 << 40, most_kv_bytes=None)

    def measure(self) -> Callable[[], MemoryUse]:
        return lambda: self.uses.pop(0) if len(self.uses) > 1 else self.uses[0]

    def release_idle(self) -> None:
        type(self).num_released += 1
