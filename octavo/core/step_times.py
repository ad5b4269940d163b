"""Types of the times of a step's parts, which a core and its workers report on request."""

from __future__ import annotations

from typing import Final, Protocol

import msgspec

SCHEDULING: Final = "scheduling"
BATCH_BUILDING: Final = "batch building"
MODEL_FORWARD: Final = "model forward"
HEAD: Final = "head"
SAMPLING: Final = "sampling"
UPDATE: Final = "taking results in"
TEXT: Final = "text and outputs"
PARTS: Final = (SCHEDULING, BATCH_BUILDING, MODEL_FORWARD, HEAD, SAMPLING, UPDATE, TEXT)
"""The parts of a step, in their order."""


class PartTime(msgspec.Struct, array_like=True):
    """Nanoseconds of a part of a step, and the nanoseconds in it of compiled kernels."""

    total_ns: int = 0
    kernels_ns: int = 0


class KernelClock(Protocol):
    """Counts the time of compiled kernels while it is on."""

    is_clock_on: bool

    @property
    def kernel_nanoseconds(self) -> int: ...
