from collections.abc import Callable
from typing import Any

def build_info() -> dict[str, str]: ...
def cpu_features() -> list[str]: ...
def instruction_sets() -> list[str]:
    """Levels of instruction sets that the kernels can run at here, best first."""

class Recording:
    """Kernel calls, kept with their addresses."""

    def run(self) -> None:
        """Make the calls again, in order."""

    def __len__(self) -> int: ...

class Cpu:
    """An instruction set, a pool of threads, and the kernels as methods; tensors are passed as addresses."""

    instruction_set: str
    threads: int
    is_alone: bool
    is_clock_on: bool
    kernel_nanoseconds: int

    def __init__(self, instruction_set: str, threads: int) -> None: ...
    def begin_recording(self) -> None:
        """Keep the calls that are made from here on."""

    def end_recording(self) -> Recording:
        """Stop keeping calls; returns what was kept."""

    def __getattr__(self, kernel: str) -> Callable[..., Any]: ...

class SharedGroup:
    """One rank's side of a group that shares memory; tensors are passed as addresses.

    Calls raise EngineDeadError when a rank does not come before the deadline, and when the memory is poisoned.
    """

    def __init__(
        self,
        descriptor: int,
        memory_bytes: int,
        offset: int,
        rank: int,
        size: int,
        first: int,
        stride: int,
        deadline_s: float,
        spin_s: float,
    ) -> None:
        """first, stride: the numbers of the group's ranks among all, for messages."""

    @staticmethod
    def head_bytes() -> int:
        """Bytes in front of all groups."""

    @staticmethod
    def group_bytes(size: int) -> int:
        """Bytes of a group of so many ranks."""

    def gather(self, share: int, stride: int, out: int, rows: int, width: int) -> None:
        """Write rows of `width` bytes from every rank, `stride` bytes apart, side by side."""

    def sum(self, partial: int, count: int, type_code: int) -> None:
        """Add elementwise, in the order of ranks."""

    def broadcast(self, data: int, num_bytes: int, source: int) -> None: ...
    def send(self, data: int, num_bytes: int, target: int) -> None: ...
    def receive(self, data: int, num_bytes: int, source: int) -> None: ...
    def poison(self, reason: str) -> None:
        """Make waiting and later calls of all ranks raise EngineDeadError."""
