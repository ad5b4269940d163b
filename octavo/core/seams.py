"""Where one part of a step hands over to the next: what a measurement puts its clocks around."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol


class Seam(NamedTuple):
    """`owner.method` does a part of every step; it is looked up on the owner at each call."""

    part: str
    owner: object
    method: str


class KernelClock(Protocol):
    """Counts the time of compiled kernels while it is on."""

    is_clock_on: bool

    @property
    def kernel_nanoseconds(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Seams:
    """All seams of an engine. Without a clock for kernels plain torch does the work."""

    parts: list[Seam]
    kernel_clock: KernelClock | None
