"""Weights of FP8 checkpoints on CUDA, with kernels interpreted: the bits of the plain weights that they stand for."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="the kernels of the device cuda need Triton")

from octavo.config.checkpoint import Checkpoint
from octavo.devices import DEVICES
from octavo.devices.cuda.ops.coded import Float8Linear
from octavo.devices.cuda.ops.linear import CudaFormat, GroupedStack, InvariantLinear
from octavo.devices.cuda.runtime import CudaRuntime
from octavo.distributed.mesh import Mesh
from octavo.models.loader import LoadedModel
from octavo.ops.coded import CodeSpec
from octavo.ops.codes import NotFinite
from octavo.ops.prepare_linear import LinearShape, PreparedLinear
from octavo.quantization.method import KeptAs
from tests.devices.cuda.interpreted import NAME
from tests.devices.cuda.test_engine import generate
from tests.fakes.byte_tokenizer import write_byte_tokenizer
from tests.fakes.checkpoints import make_checkpoint
from tests.fakes.quantized import fp8, quantize
from tests.ops.test_experts import EXPERTS, route_tokens

RUNTIMES = [CudaRuntime(has_float8=has_float8) for has_float8 in (False, True)]
BLOCKS = CodeSpec(8, 128, "none", torch.float32, is_float=True)
CHANNELS = CodeSpec(8, 0, "none", torch.float32, is_float=True)


def stored(spec: CodeSpec, outputs: int, inputs: int) -> dict[str, Tensor]:
    """Codes of every kind: also the smallest numbers, and zeros of both signs."""
    generator = torch.Generator().manual_seed(inputs)
    codes = torch.randint(0, 256, (outputs, inputs), generator=generator).to(torch.uint8)
    codes[(codes & 127) == 127] = 0  # NaN
    scales = torch.rand(outputs, spec.num_groups(inputs), generator=generator) / inputs
    return {"codes": codes, "scales": scales}


def both(runtime: CudaRuntime, spec: CodeSpec, outputs: int, inputs: int, **options: Any) -> list[PreparedLinear]:
    """The weight as it is stored, and as a plain one."""
    weight = stored(spec, outputs, inputs)
    made = runtime.bind().prepare_coded(spec)(weight, torch.float16, **options)
    assert isinstance(made, Float8Linear)
    return [made, CudaFormat(InvariantLinear, runtime)(spec.dequantized(weight).half(), **options)]


@pytest.mark.parametrize(("spec", "inputs"), [(BLOCKS, 300), (BLOCKS, 512), (CHANNELS, 70)])
@pytest.mark.parametrize("tokens", [1, 70])
@pytest.mark.parametrize("runtime", RUNTIMES, ids=["bytes", "floats"])
def test_products_have_the_bits_of_plain_weights(
    runtime: CudaRuntime, tokens: int, spec: CodeSpec, inputs: int
) -> None:
    x = torch.randn(tokens, inputs).half()  # the interpreter cuts numbers off to bfloat16
    for ours, plain in (
        both(runtime, spec, 44, inputs),
        both(runtime, spec, 44, inputs, bias=torch.randn(44).half(), gated=True),
    ):
        assert torch.equal(ours(x), plain(x))
        add = torch.randn(tokens, 44)
        assert torch.equal(ours(x, add), plain(x, add))
        assert torch.equal(ours(x[:1]), ours(x)[:1])
        ids = torch.tensor([3, 0, 43])
        assert torch.equal(ours.rows(ids), plain.rows(ids))
        if not ours.shape.is_gated:
            assert torch.equal(ours.in_float32(x), plain.in_float32(x))


@pytest.mark.parametrize("code", [127, 255])
def test_codes_that_are_no_numbers_are_refused_by_their_row(code: int) -> None:
    weight = stored(CHANNELS, 5, 70)
    weight["codes"][3, 69] = code
    with pytest.raises(NotFinite, match="row 3"):
        RUNTIMES[0].bind().prepare_coded(CHANNELS)(weight, torch.float16)


@pytest.mark.parametrize("spec", [BLOCKS, CHANNELS], ids=["blocks", "outputs"])
def test_experts_have_the_bits_of_plain_weights(spec: CodeSpec) -> None:
    weights = [stored(spec, 44, 300) for _ in range(EXPERTS)]
    for number, each in enumerate(weights):
        each["scales"] = each["scales"] * (1 + number)
    state = {name: torch.stack([each[name] for each in weights]) for name in ("codes", "scales")}
    plain = torch.stack([spec.dequantized(each) for each in weights]).half()
    shape = LinearShape(44, 300, torch.float16, is_gated=True)
    stack = RUNTIMES[1].bind().prepare_coded(spec).restore_stack(shape, state)
    expected = CudaFormat(InvariantLinear, RUNTIMES[1]).restore_stack(shape, {"weight": plain})
    assert isinstance(stack, GroupedStack)
    for tokens in (2, 40):
        x, routing = torch.randn(tokens, 300).half(), route_tokens(tokens)
        assert torch.equal(stack(x, routing, of_tokens=True), expected(x, routing, of_tokens=True))


@pytest.mark.parametrize(
    "columns", [pytest.param(128, id="blocks"), pytest.param(0, id="outputs", marks=pytest.mark.long)]
)
def test_a_checkpoint_stays_as_it_is_and_gives_the_bits_of_its_plain_weights(
    columns: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: Any = {"vocab_size": 300, "hidden_size": 256, "intermediate_size": 160, "num_hidden_layers": 1}
    plain = make_checkpoint("llama", tmp_path / "model", **sizes)
    config = {"quant_method": "fp8"} | ({"weight_block_size": [128, columns]} if columns else {})
    encode = fp8(128, columns, ".weight_scale_inv") if columns else fp8(1, 0, ".weight_scale")
    path = write_byte_tokenizer(quantize(plain, encode, config))
    opened = partial(LoadedModel.open, Checkpoint.open(path), Mesh.single(), torch.bfloat16)
    layer = "layers.0.mlp.gate_up_proj"
    names = {name for name, _ in opened(kept_as=KeptAs(has_float8=True)).model.named_parameters() if layer in name}
    assert {name.rpartition(".")[2] for name in names} >= {"codes", "scales"}
    monkeypatch.setitem(DEVICES, "cuda", NAME)
    options: Any = {"device": "cuda", "batch_invariant": True, "max_tokens": 2}
    found = generate(path, **options)
    monkeypatch.setattr(f"{NAME}.keeps_float8", False)
    assert generate(path, **options) == found
