"""Quantising while loading: every family, planned sizes, and weights that cannot be quantised."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo.config.checkpoint import Checkpoint
from octavo.devices.cpu.runtime import CpuRuntime
from octavo.distributed.mesh import Mesh
from octavo.errors import CheckpointError
from octavo.models.decoder import DecoderStack
from octavo.ops.registry import Ops, bind
from octavo.platform import Platform
from octavo.quantization.registry import method_named
from tests.fakes.checkpoints import edit_tensors, make_checkpoint
from tests.models import paged_run
from tests.models.loading import open_model
from tests.models.paged_run import logits_of
from tests.models.peak import needs_peak, peak_of_loading

PLATFORM = Platform.detect()
REFERENCE = bind()


@cache
def bound() -> Ops:
    return CpuRuntime.open().bind()


def load(path: Path, quantization: str | None, ops: Ops, **options: Any) -> DecoderStack:
    return paged_run.load(path, ops=ops, method=method_named(quantization), **options)


@pytest.mark.parametrize("family", ["llama", "qwen3", "opt", "gpt2"])
@pytest.mark.parametrize(("quantization", "error"), [("int8", 0.1), ("int4", 0.6)])
def test_every_family_answers_nearly_as_before(family: str, quantization: str, error: float, tmp_path: Path) -> None:
    path = make_checkpoint(family, tmp_path)
    plain = logits_of(load(path, None, REFERENCE))
    reference, kernels = (logits_of(load(path, quantization, ops)) for ops in (REFERENCE, bound()))
    torch.testing.assert_close(kernels, reference, rtol=1e-3, atol=1e-3 * float(plain.std()))
    assert 0 < (reference - plain).norm() / (plain - plain.mean()).norm() < error


@pytest.mark.parametrize("quantization", ["int8", "int4", "int4-g128"])
def test_a_model_takes_what_was_planned(quantization: str, tmp_path: Path) -> None:
    path = make_checkpoint("qwen3", tmp_path)
    skeleton = open_model(Checkpoint.open(path), Mesh.single(), method=method_named(quantization))
    for ops in (REFERENCE, bound()):
        state = load(path, quantization, ops).state()
        assert skeleton.planned_bytes(ops) == sum(tensor.nbytes for tensor in state.values())


@pytest.mark.parametrize("kernels", [False, True], ids=["reference", "bound"])
@pytest.mark.parametrize("quantization", ["int8", "int4"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_an_infinite_weight_is_refused_by_name(kernels: bool, quantization: str, value: float, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    path = make_checkpoint("llama", tmp_path)
    name = "model.layers.1.self_attn.k_proj.weight"
    weight = load_file(path / "model.safetensors")[name].clone()
    weight[12, 5] = value
    edit_tensors(path, **{name: weight})
    for mesh in (Mesh.single(), Mesh.of_rank(1, tensor=2)):
        with pytest.raises(CheckpointError, match=r"layers\.1\.self_attn\.k_proj\.weight holds NaN or an infinity"):
            load(path, quantization, bound() if kernels else REFERENCE, mesh=mesh)


def load_for_peak(path: Path, quantization: str) -> DecoderStack:
    return load(path, quantization, bound())


@needs_peak
@pytest.mark.parametrize("quantization", ["int4", pytest.param("int8", marks=pytest.mark.long)])
def test_the_peak_is_the_quantised_weights_and_the_layers_in_between(quantization: str, tmp_path: Path) -> None:
    plain, weights, peak, after = peak_of_loading(tmp_path, __name__, quantization, tie_word_embeddings=True)
    assert weights < plain / (3.5 if quantization == "int8" else 6)
    ahead, largest = 64 << 20, 4 * 4096 * 512  # what is read before it is asked for; gate and up, plain
    assert peak <= weights + ahead + 2 * largest < plain, f"{peak - weights:,} above the packed weights"
    assert after <= weights + (24 << 20), f"{after - weights:,} above the packed weights"
