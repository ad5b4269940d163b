"""The choice of a device at start, and what a new device takes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

import octavo
from octavo import LLM, SamplingParams
from octavo.config.schema import DeviceConfig
from octavo.devices import DEVICES
from octavo.devices.cpu.runtime import obstacle
from octavo.devices.cuda.device import CudaDevice
from octavo.devices.device import _device_class, open_device
from octavo.devices.reference.device import ReferenceDevice
from octavo.errors import ConfigError
from octavo.platform import Platform
from tests.conformance.runtimes import LEVELS, PLATFORM
from tests.fakes.byte_tokenizer import write_byte_tokenizer
from tests.fakes.checkpoints import make_checkpoint

BARE = msgspec.structs.replace(PLATFORM, native_module=None)


def config(**settings: Any) -> DeviceConfig:
    return DeviceConfig(threads=1, **settings)


class ToyDevice(ReferenceDevice):
    """The reference under another name, which counts the steps."""

    name = "toy"
    steps = 0

    def begin_step(self, num_tokens: int) -> None:
        type(self).steps += 1


@pytest.mark.skipif(not LEVELS, reason="the compiled kernels cannot run on this machine")
@pytest.mark.skipif(CudaDevice.obstacle(PLATFORM) is None, reason="this machine has a GPU, which is better")
def test_auto_takes_the_best_device_and_a_name_the_one_it_says() -> None:
    best, named = open_device(config(), PLATFORM), open_device(config(device="reference"), PLATFORM)
    assert (best.name, best.because) == ("cpu", f"cuda cannot run: {CudaDevice.obstacle(PLATFORM)}")
    assert (named.name, named.because) == ("reference", "asked for")
    assert best.kernel_clock is not None
    assert named.kernel_clock is None


def test_a_checkout_that_hides_the_installation_is_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed = tmp_path / "octavo"
    installed.mkdir()
    (tmp_path / "octavo-1.0.dist-info").mkdir()
    (tmp_path / "octavo-1.0.dist-info" / "METADATA").write_text("Name: octavo\nVersion: 1.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert str(obstacle(BARE)).startswith("the compiled library is absent: install a C++20 compiler")
    (installed / "_native.so").touch()
    because = str(obstacle(BARE))
    assert f"absent: {Path(octavo.__file__).parent} was imported, and not {installed}, which has it" in because


def test_without_the_compiled_library_the_reference_runs_and_says_why(caplog: pytest.LogCaptureFixture) -> None:
    open_device(config(device="reference"), BARE)
    assert caplog.messages == []
    device = open_device(config(), BARE)
    assert device.name == "reference"
    assert "cpu cannot run: the compiled library is absent" in device.because
    (warning,) = caplog.messages
    assert warning.startswith("the compiled library is absent")
    assert warning.endswith("several times slower")
    assert {choice.implementation for choice in device.ops.choices} == {"reference"}


class AbsentDevice(ReferenceDevice):
    """A device that no machine has."""

    name = "absent"

    @staticmethod
    def obstacle(platform: Platform) -> str | None:
        return "there is none"


@pytest.mark.skipif(not LEVELS, reason="the compiled kernels cannot run on this machine")
def test_a_device_that_a_machine_does_not_have_is_no_warning(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    others = {name: path for name, path in DEVICES.items() if name != "cuda"}
    monkeypatch.setattr("octavo.devices.device.DEVICES", {"absent": f"{__name__}.AbsentDevice", **others})
    device = open_device(config(), PLATFORM)
    assert (device.name, device.because) == ("cpu", "absent cannot run: there is none")
    assert caplog.messages == []
    open_device(config(), BARE)
    (warning,) = caplog.messages
    assert warning.startswith("the compiled library is absent")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"device": "cpu"}, "device is cpu, but the compiled library is absent: .*; or leave device at auto"),
        ({"instruction_set": "avx2"}, "instruction_set is avx2, but the device reference runs no compiled kernels"),
    ],
)
def test_what_cannot_run_here_is_refused_with_the_reason(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        open_device(config(**settings), BARE)


@pytest.mark.skipif(torch.version.cuda is not None, reason="this PyTorch is built with CUDA")
def test_cuda_is_refused_with_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"device is cuda, but this PyTorch \(.*\) is built without CUDA.*; or leave device at auto"
    ):
        open_device(config(device="cuda"), BARE)


def test_a_device_has_the_name_by_which_it_is_asked_for() -> None:
    assert [_device_class(name).name for name in DEVICES] == list(DEVICES)


def test_a_new_device_is_one_line_and_generates_the_same_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make_checkpoint("llama", tmp_path / "model", vocab_size=300, eos_token_id=257)
    tiny_model = str(write_byte_tokenizer(path))
    monkeypatch.setitem(DEVICES, "toy", f"{__name__}.ToyDevice")
    params = SamplingParams(max_tokens=6, seed=3, ignore_eos=True)
    texts = []
    for name in ("toy", "reference"):
        with LLM(tiny_model, device=name, num_gpu_blocks_override=20) as llm:
            (output,) = llm.generate([{"prompt_token_ids": [5, 6, 7]}], params)
        texts.append(output.outputs[0].token_ids)
    assert len(texts[0]) == 6
    assert texts[0] == texts[1]
    assert ToyDevice.steps == 6


@pytest.mark.parametrize("method", ["int8", "int4", "int4-g128"])
def test_the_reference_runs_quantized_weights(method: str, tmp_path: Path) -> None:
    path = make_checkpoint("llama", tmp_path / "model", vocab_size=300, eos_token_id=257)
    params = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
    options: dict[str, Any] = {"device": "reference", "num_gpu_blocks_override": 20}
    with LLM(str(write_byte_tokenizer(path)), quantization=method, **options) as llm:
        (output,) = llm.generate([{"prompt_token_ids": [5, 6, 7]}], params)
    assert len(output.outputs[0].token_ids) == 6
