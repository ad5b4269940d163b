"""The runtimes that conformance is tested with: every level of this machine, the model of the tiles included."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from octavo.config.schema import DeviceConfig
from octavo.devices.cpu.runtime import CpuRuntime
from octavo.devices.device import Device, open_device
from octavo.ops.registry import Ops
from octavo.platform import Platform

PLATFORM = Platform.detect()
LEVELS: tuple[str, ...] = ()
if PLATFORM.native_module is not None:
    from octavo import _native

    LEVELS = tuple(_native.instruction_sets())

TYPES = (torch.float32, torch.bfloat16)


REFERENCE: Device = open_device(DeviceConfig(device="reference", threads=1), PLATFORM)


@cache
def runtime(level: str, threads: int = 1) -> Any:
    """One runtime per level and number of threads, for all tests."""
    return CpuRuntime.open(threads, level)


@cache
def ops(level: str, threads: int = 1) -> Ops:
    """The operators bound to it."""
    return runtime(level, threads).bind()
