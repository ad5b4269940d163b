"""What is refused when the device is opened, by name and number."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="the kernels of the device cuda need Triton")

import octavo.devices.cuda.device as cuda
from octavo.config.schema import DeviceConfig
from octavo.devices import DEVICES
from octavo.devices.cuda import driver
from octavo.devices.device import open_device
from octavo.errors import ConfigError
from tests.conformance.runtimes import PLATFORM
from tests.devices.cuda.interpreted import NAME, InterpretedCuda

CONFIG = DeviceConfig(device="cuda", threads=1)


class Library:
    """A driver that runs CUDA 12.8."""

    def cuDriverGetVersion(self, number: Any) -> int:  # noqa: N802
        number._obj.value = 12080
        return 0


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let PyTorch be built with CUDA 13.0, and find a GPU of capability 9.0."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA T4")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))


def without_driver(name: str) -> Any:
    raise OSError(f"{name}: cannot open shared object file")


@pytest.mark.parametrize(
    ("built_with", "open_library", "message"),
    [
        ("13.0", without_driver, "no driver of NVIDIA is installed: libcuda.so.1 is missing"),
        ("13.0", lambda _: Library(), "the driver runs CUDA up to 12.8, and this PyTorch is built with 13.0"),
        (
            "12.9",
            lambda _: Library(),
            r"there is no GPU .*\(.* up to 12.8, .* with 12.9\): check .*CUDA_VISIBLE",
        ),
    ],
    ids=["no driver", "old driver", "no GPU"],
)
def test_a_gpu_that_cannot_be_used_is_refused_with_what_is_missing(
    built_with: str, open_library: Any, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.version, "cuda", built_with)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(driver, "CDLL", open_library)
    with pytest.raises(ConfigError, match=f"device is cuda, but {message}"):
        open_device(CONFIG, PLATFORM)


def test_a_gpu_of_another_capability_is_refused_by_name_and_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    with pytest.raises(ConfigError, match=r"but NVIDIA T4 has compute capability 7.5, and 8.0 is needed"):
        open_device(CONFIG, PLATFORM)


def test_the_gpu_of_each_rank_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(DEVICES, "cuda", NAME)
    monkeypatch.setattr(InterpretedCuda, "_capability", lambda _: (7, 0))
    with pytest.raises(ConfigError, match=r"the GPU 1 of this rank has compute capability 7.0, and 8.0 is needed"):
        open_device(CONFIG, PLATFORM, place=1)


def test_without_triton_and_binaries_no_kernel_can_be_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "triton_version", lambda: None)
    monkeypatch.setattr(cuda, "FOLDER", SimpleNamespace(is_dir=lambda: False))
    with pytest.raises(ConfigError, match=r"but Triton is not installed: pip install 'octavo\[cuda\]'"):
        open_device(CONFIG, PLATFORM)


@pytest.mark.parametrize(
    ("head_dims", "cache_dtype", "block_size", "message"),
    [
        ({64, 640}, torch.bfloat16, 16, "device is cuda, .* head sizes from 8 to 576, not 640; use the device cpu"),
        ({4}, torch.bfloat16, 16, "device is cuda, .* head sizes from 8 to 576, not 4; use the device cpu"),
        ({64}, torch.int8, 6, "block_size is 6, .* multiple of 4 tokens: set it to 8, or kv_cache_dtype to auto"),
    ],
)
def test_heads_and_blocks_that_kernels_do_not_have_are_refused(
    head_dims: set[int], cache_dtype: torch.dtype, block_size: int, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(DEVICES, "cuda", NAME)
    device = open_device(CONFIG, PLATFORM)
    with pytest.raises(ConfigError, match=message):
        device.attention(torch.bfloat16, cache_dtype, head_dims=head_dims, block_size=block_size)
