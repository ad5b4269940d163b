"""Quantising while loading: every family, planned sizes, and weights that cannot be quantised."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo.attention.reference import ReferenceBackend
from octavo.config.checkpoint import Checkpoint
from octavo.distributed.mesh import Mesh
from octavo.errors import CheckpointError
from octavo.models.causal_lm import CausalLM
from octavo.models.loader import load_model, make_model
from octavo.ops.registry import Ops, bind, open_runtime
from octavo.platform import Platform
from octavo.quantization.registry import method_named
from tests.fakes.checkpoints import edit_tensors, make_checkpoint
from tests.models.paged_run import PagedRun, Stream

PLATFORM = Platform.detect()
REFERENCE = bind(PLATFORM, candidates=())


@cache
def bound() -> Ops:
    return bind(PLATFORM, runtime=open_runtime(PLATFORM))


def load(path: Path, quantization: str | None, ops: Ops, **options: Any) -> CausalLM:
    return load_model(
        Checkpoint.open(path),
        dtype=torch.float32,
        mesh=Mesh.single(),
        backend=ReferenceBackend(),
        ops=ops,
        method=method_named(quantization),
        **options,
    )


def logits(model: CausalLM) -> torch.Tensor:
    run, stream = PagedRun(model), Stream([5, 6, 7, 8, 9])
    run.step([(stream, 5)])
    return torch.stack(stream.logits)


@pytest.mark.parametrize("family", ["llama", "qwen3", "opt", "gpt2"])
@pytest.mark.parametrize(("quantization", "error"), [("int8", 0.1), ("int4", 0.6)])
def test_every_family_answers_nearly_as_before(family: str, quantization: str, error: float, tmp_path: Path) -> None:
    path = make_checkpoint(family, tmp_path)
    plain = logits(load(path, None, REFERENCE))
    reference, kernels = (logits(load(path, quantization, ops)) for ops in (REFERENCE, bound()))
    torch.testing.assert_close(kernels, reference, rtol=1e-3, atol=1e-3 * float(plain.std()))
    assert 0 < (reference - plain).norm() / (plain - plain.mean()).norm() < error


@pytest.mark.parametrize("quantization", ["int8", "int4", "int4-g128"])
def test_a_model_takes_what_was_planned(quantization: str, tmp_path: Path) -> None:
    path = make_checkpoint("qwen3", tmp_path)
    skeleton = make_model(Checkpoint.open(path), Mesh.single(), method=method_named(quantization))
    for ops in (REFERENCE, bound()):
        state = load(path, quantization, ops).state()
        assert skeleton.planned_bytes(ops) == sum(tensor.nbytes for tensor in state.values())


@pytest.mark.parametrize("kernels", [False, True], ids=["reference", "bound"])
@pytest.mark.parametrize("quantization", ["int8", "int4"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_weight_that_is_not_finite_is_refused_by_name(
    kernels: bool, quantization: str, value: float, tmp_path: Path
) -> None:
    from safetensors.torch import load_file

    path = make_checkpoint("llama", tmp_path)
    name = "model.layers.1.self_attn.k_proj.weight"
    weight = load_file(path / "model.safetensors")[name].clone()
    weight[3, 5] = value
    edit_tensors(path, **{name: weight})
    with pytest.raises(CheckpointError, match=r"layers\.1\.self_attn\.k_proj\.weight holds NaN or an infinity"):
        load(path, quantization, bound() if kernels else REFERENCE)
