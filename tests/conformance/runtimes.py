"""The runtimes that conformance is tested with: every level of this machine, the model of the tiles included."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
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
_CMAKE = (Path(__file__).parents[2] / "CMakeLists.txt").read_text()


def levels_of(subject: str) -> tuple[str, ...]:
    """The levels of this machine for which a subject of csrc/cpu is compiled, or the first of them if it is for none.

    At any other level the code of one of these runs; `test_operators.py` tests that one does.
    """
    (built,) = re.findall(rf"^ *add_kernels\({subject} ?([^)]*)\)$", _CMAKE, re.MULTILINE)
    return tuple(each for each in LEVELS if each in built.split()) or LEVELS[:1]


REFERENCE: Device = open_device(DeviceConfig(device="reference", threads=1), PLATFORM)


@cache
def runtime(level: str, threads: int = 1) -> Any:
    """One runtime per level and number of threads, for all tests."""
    return CpuRuntime.open(threads, level)


@cache
def ops(level: str, threads: int = 1) -> Ops:
    """The operators bound to it."""
    return runtime(level, threads).bind()
