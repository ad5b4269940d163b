"""What is taken of a GPU's memory, by what the driver and PyTorch say."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="the kernels of the device cuda need Triton")

from octavo.devices.cuda.device import CudaDevice
from octavo.devices.device import MemoryUse


class Driver:
    """A GPU of 100 bytes. kept: what PyTorch holds, peak: at most. others: what libraries, graphs and other processes
    hold."""

    kept, peak, others = 10, 10, 8

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (100 - self.kept - self.others, 100))
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: self.kept)
        monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda _: self.peak)
        monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda _: setattr(self, "peak", self.kept))


@pytest.mark.parametrize(
    ("kept", "peak", "others", "expected"),
    [
        (10, 10, 8, MemoryUse(0, 0)),
        (45, 45, 8, MemoryUse(35, 0)),
        (45, 50, 13, MemoryUse(45, 5)),  # five were given back, and five are outside PyTorch
        (45, 50, 2, MemoryUse(40, -6)),  # another process gave six back
    ],
)
def test_the_peak_has_what_the_driver_and_pytorch_count(
    kept: int, peak: int, others: int, expected: MemoryUse, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = Driver(monkeypatch)
    driver.peak = 70  # of what was loaded before
    device: Any = SimpleNamespace(torch_device=torch.device("cpu"))
    taken = CudaDevice.measure(device)
    driver.kept, driver.peak, driver.others = kept, max(peak, driver.peak), others
    assert taken() == expected
