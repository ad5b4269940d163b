"""The device CUDA with its kernels interpreted."""

from __future__ import annotations

from collections.abc import Callable

import torch

from octavo.devices.cuda.device import CudaDevice
from octavo.devices.cuda.graphs import Graph
from octavo.devices.cuda.runtime import Launcher, launch_by_triton
from octavo.devices.cuda.swaps import Stream
from octavo.devices.device import DeviceMemory, MemoryUse
from octavo.ops.memory import zeroed
from octavo.platform import Platform
from tests.devices.cuda.streams import HostStream, LateStream

NAME = "tests.devices.cuda.interpreted.InterpretedCuda"
"""For `DEVICES`."""


class RepeatedCalls:
    """A `Graph` that calls again what it captured: with the numbers that the host had then, on the same tensors."""

    num_captures = 0
    num_replays = 0

    def capture(self, run: Callable[[], object]) -> None:
        type(self).num_captures += 1
        self.replay_run = run

    def replay(self) -> None:
        type(self).num_replays += 1
        self.replay_run()


class InterpretedCuda(CudaDevice):
    """Everything of the device but the GPU: tensors are on the CPU, Triton interprets."""

    ranks_over = "gloo"
    num_gpus = 4
    warms_up = False
    """Interpreted steps of thousands of tokens would take minutes."""

    def _num_gpus(self) -> int:
        return self.num_gpus

    def _current(self, index: int) -> torch.device:
        return torch.device("cpu")

    def launcher(self, is_invariant: bool) -> Launcher:
        return launch_by_triton

    def _capability(self) -> tuple[int, int]:
        return 9, 0

    def shared_bytes(self) -> int:
        return 228 << 10

    @staticmethod
    def obstacle(platform: Platform) -> str | None:
        return None

    def graphs(self) -> Callable[[], Graph]:
        return RepeatedCalls

    def read_later(self, values: torch.Tensor) -> Callable[[], list[list[float]]]:
        return values.tolist

    def _pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return zeroed(shape, dtype)  # takes memory when it is written

    def _streams(self) -> tuple[Stream, Stream]:
        return HostStream(), LateStream()

    def measure(self) -> Callable[[], MemoryUse]:
        return lambda: MemoryUse(self.peak_bytes, 0)

    peak_bytes = 0

    def memory(self) -> DeviceMemory:
        return DeviceMemory.of_host(self._memory)

    def release_idle(self) -> None:
        """Do nothing: torch keeps no memory of the CPU."""
