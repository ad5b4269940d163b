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
