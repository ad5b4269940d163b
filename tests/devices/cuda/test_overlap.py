"""Launches that begin while earlier ones run: which do, what they wait for, and that no bit changes."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="the kernels of the device cuda need Triton")

from benchmarks.gpu.overlap import DEPENDENT, overlapping
from octavo import LLM, SamplingParams
from octavo.devices import DEVICES
from octavo.devices.cuda.ops.linear import FEW
from octavo.devices.cuda.runtime import CudaRuntime, Launcher, launch_by_triton, triton_function
from tests.devices.cuda.interpreted import InterpretedCuda
from tests.fakes.byte_tokenizer import write_byte_tokenizer
from tests.fakes.checkpoints import make_checkpoint

LAUNCHED: list[tuple[str, dict[str, Any]]] = []


def noting(launch: Launcher) -> Launcher:
    """Return what notes each launch before it makes it."""

    def launch_noted(kernel: str, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
        LAUNCHED.append((kernel, constants))
        options = {name: value for name, value in constants.items() if name != "launch_pdl"}  # of a GPU
        launch(kernel, grid, *arguments, **options)

    return launch_noted


class Ordinary(InterpretedCuda):
    """The device."""

    def launcher(self, is_invariant: bool) -> Launcher:
        return noting(launch_by_triton)


class Overlapping(InterpretedCuda):
    """The device with launches that overlap."""

    def launcher(self, is_invariant: bool) -> Launcher:
        return overlapping(noting(launch_by_triton))


@pytest.fixture(autouse=True)
def _none_launched() -> None:
    LAUNCHED.clear()


def test_the_launcher_marks_the_kernels_that_wait_and_no_others() -> None:
    kept: list[tuple[str, dict[str, Any]]] = []
    launch = overlapping(lambda kernel, grid, *arguments, **constants: kept.append((kernel, constants)))
    for kernel in (*sorted(DEPENDENT), "attention.store", "coded.coded_linear", "sampling.peaks"):
        launch(kernel, (1,), 7, BLOCK=3)
    early = {"BLOCK": 3, "IS_DEPENDENT": True, "launch_pdl": True}
    assert kept[: len(DEPENDENT)] == [(kernel, early) for kernel in sorted(DEPENDENT)]
    assert [constants for _, constants in kept[len(DEPENDENT) :]] == [{"BLOCK": 3}] * 3


def test_each_of_these_kernels_waits_and_only_if_it_is_told_to() -> None:
    for kernel in DEPENDENT:
        function = triton_function(kernel)
        assert inspect.signature(function.fn).parameters["IS_DEPENDENT"].default is False, kernel


def products(runtime: CudaRuntime) -> list[Tensor]:
    """Return products with weights of one chunk, of several, of fewer inputs than are requested early, and of inputs
    that are no whole tiles; with gates and without."""
    torch.manual_seed(0)
    found = []
    for inputs, rows in ((1024, 1), (1024, FEW), (256, 3), (640, 3), (1000, 1)):
        weight, x = (torch.randn(64, inputs) * 0.03).bfloat16(), torch.randn(rows, inputs).bfloat16()
        for gated in (False, True):
            found.append(runtime.bind().prepare_linear(weight, gated=gated)(x))
    return found


@pytest.mark.parametrize("is_invariant", [False, True])
def test_products_that_request_weights_early_have_the_same_bits(is_invariant: bool) -> None:
    plain = products(CudaRuntime(is_invariant, launch_by_triton))
    early = products(CudaRuntime(is_invariant, overlapping(noting(launch_by_triton))))
    assert all(map(torch.equal, plain, early))
    assert all(constants["launch_pdl"] for _, constants in LAUNCHED if "CHUNKS" in constants)
    assert any(constants.get("IS_DIVIDED") for _, constants in LAUNCHED)
    assert any(kernel == "linear.chunks_at_once" for kernel, _ in LAUNCHED)


def test_an_engine_answers_the_same(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: Any = {"vocab_size": 320, "hidden_size": 128, "intermediate_size": 128, "num_attention_heads": 2}
    sizes |= {"num_key_value_heads": 1, "head_dim": 64, "max_position_embeddings": 512}
    path = make_checkpoint("qwen3", tmp_path / "model", **sizes)
    write_byte_tokenizer(path)
    params = SamplingParams(temperature=0.8, seed=1, max_tokens=3, logprobs=2, ignore_eos=True)
    prompts: Any = [{"prompt_token_ids": [5 + i * 7 % 90 for i in range(length)]} for length in (3, 20)]
    found = []
    for device in (Ordinary, Overlapping):
        monkeypatch.setitem(DEVICES, "cuda", f"{__name__}.{device.__name__}")
        with LLM(str(path), device="cuda", dtype="bfloat16", max_model_len=64, num_gpu_blocks_override=16) as llm:
            found.append([each.outputs[0] for each in llm.generate(prompts, params, use_tqdm=False)])
        assert {kernel for kernel, constants in LAUNCHED if "launch_pdl" in constants} == (
            # of long sequences, and of more inputs
            DEPENDENT - {"attention.merge", "linear.chunks_at_once"} if device is Overlapping else set()
        )
        LAUNCHED.clear()
    assert found[0] == found[1]
