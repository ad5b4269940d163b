"""Quantised checkpoints that contradict themselves are refused with the tensor's name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from octavo.config.checkpoint import Checkpoint
from octavo.devices.reference.attention import ReferenceBackend
from octavo.distributed.mesh import Mesh
from octavo.errors import CheckpointError, OctavoError
from octavo.models.loader import LoadedModel
from octavo.ops.registry import bind
from tests.fakes.checkpoints import edit_config, make_checkpoint
from tests.fakes.quantized import (
    awq,
    bitnet,
    bitsandbytes,
    compressed_tensors,
    floats,
    fp8,
    gptq,
    mxfp4,
    nvfp4,
    quantize,
)

NAME = "model.layers.1.mlp.up_proj"
FORMATS = {
    "ct": compressed_tensors(4, 32, symmetric=False),
    "gptq": gptq(4, 32, ordered=True),
    "awq": awq(32),
    "fp8": (fp8(16, 16, ".weight_scale_inv"), {"quant_method": "fp8", "weight_block_size": [16, 16]}),
    "mxfp4": (mxfp4, floats(4, "group", 32)),
    "nvfp4": (nvfp4, floats(4, "tensor_group", 16)),
    "bitnet": (bitnet(divides=True), {"quant_method": "bitnet"}),
    "nf4": (bitsandbytes(64, nested=True), {"quant_method": "bitsandbytes", "load_in_4bit": True}),
}
Edit = Callable[[Tensor], Tensor | None]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("made")
    sizes: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 64}
    return {name: quantize(make_checkpoint("llama", folder / name, **sizes), *FORMATS[name]) for name in FORMATS}


def load(path: Path) -> None:
    LoadedModel.open(Checkpoint.open(path), Mesh.single()).load(bind(), ReferenceBackend())


def missing(_: Tensor) -> None:
    return None


def nan(tensor: Tensor) -> Tensor:
    tensor = tensor.clone()
    tensor.view(torch.uint8).flatten()[:4] = 255  # NaN in every type of floats
    return tensor


def narrower(tensor: Tensor) -> Tensor:
    return tensor[..., :-1].contiguous() if tensor.dim() > 1 and tensor.shape[-1] > 1 else tensor[:-1].contiguous()


@pytest.mark.parametrize(
    ("kind", "suffix", "edit", "message"),
    [
        ("ct", ".weight_scale", missing, r"up_proj\.weight_scale is missing"),
        ("ct", ".weight_scale", nan, r"up_proj\.weight_scale holds nan in row 0"),
        ("ct", ".weight_scale", narrower, r"up_proj\.weight_scale has shape \[64, 1\].*requires \[64, 2\]"),
        ("ct", ".weight_packed", narrower, r"up_proj\.weight_packed has shape \[64, 7\].*requires \[64, 8\]"),
        ("ct", ".weight_packed", lambda x: x.float(), r"up_proj\.weight_packed is stored as F32, expected I32"),
        ("ct", ".weight_packed", lambda x: x.flatten(), r"up_proj\.weight_packed has shape \[512\], expected two"),
        ("ct", ".weight_zero_point", missing, r"up_proj\.weight_zero_point is missing"),
        ("ct", ".weight_zero_point", narrower, r"up_proj\.weight_zero_point has shape"),
        ("ct", ".weight_shape", lambda x: torch.tensor([3]), r"up_proj\.weight_shape is I64 \[1\], expected two"),
        ("ct", ".weight_shape", lambda x: torch.tensor([64, 10**6]), r"up_proj\.weight_packed has shape"),
        ("ct", ".weight", lambda x: torch.zeros(64, 64), r"up_proj\.weight is stored in F32 and quantised as .*too"),
        ("gptq", ".qzeros", missing, r"up_proj\.qzeros is missing"),
        ("gptq", ".qzeros", lambda x: x + 1, r"up_proj\.qzeros holds a zero point other than 8 .*although sym is true"),
        ("gptq", ".scales", nan, r"up_proj\.scales holds nan"),
        ("gptq", ".g_idx", lambda x: x + 1, r"up_proj\.g_idx has group 2 for input \d+, expected 0 to 1"),
        ("gptq", ".g_idx", lambda x: x * 0 + 1, r"up_proj\.g_idx has groups of other sizes than group_size"),
        ("gptq", ".qweight", narrower, r"up_proj\.scales has shape \[2, 64\].*requires \[2, 63\]"),
        ("awq", ".qweight", narrower, r"up_proj\.scales has shape \[2, 64\].*requires \[2, 56\]"),
        ("awq", ".scales", missing, r"up_proj\.scales is missing"),
        ("fp8", ".weight_scale_inv", missing, r"up_proj\.weight_scale_inv is missing"),
        ("fp8", ".weight_scale_inv", nan, r"up_proj\.weight_scale_inv holds nan"),
        ("fp8", ".weight_scale_inv", narrower, r"up_proj\.weight_scale_inv has shape \[4, 3\].*requires \[4, 4\]"),
        ("mxfp4", ".weight_scale", nan, r"up_proj\.weight_scale holds NaN, exponent 255, in row 0"),
        ("nvfp4", ".weight_global_scale", missing, r"up_proj\.weight_global_scale is missing"),
        (
            "nvfp4",
            ".weight_global_scale",
            lambda x: -x,
            r"up_proj\.weight_global_scale is .*expected one number above 0",
        ),
        ("nvfp4", ".weight_scale", nan, r"up_proj\.weight_scale holds nan"),
        ("bitnet", ".weight_scale", missing, r"up_proj\.weight_scale is missing"),
        ("bitnet", ".weight_scale", nan, r"up_proj\.weight_scale holds nan"),
        ("bitnet", ".weight_scale", lambda x: -x, r"up_proj\.weight_scale is -.*, expected a number above 0"),
        ("bitnet", ".weight_scale", lambda x: x.repeat(2), r"up_proj\.weight_scale has shape \[2\].*requires \[1\]"),
        ("bitnet", ".weight", lambda x: x | 12, r"up_proj\.weight has a code of 3 in row 16, expected 0, 1 and 2"),
        ("bitnet", ".weight", narrower, r"up_proj\.codes has shape \[64, 63\]"),
        ("nf4", ".weight.absmax", missing, r"up_proj\.weight\.absmax is missing"),
        ("nf4", ".weight.nested_absmax", nan, r"up_proj\.weight\.nested_absmax holds nan"),
        ("nf4", ".weight.quant_map", narrower, r"up_proj\.weight\.quant_map has shape \[15\].*requires \[16\]"),
        ("nf4", ".weight.quant_state.bitsandbytes__nf4", narrower, r"quant_state.bitsandbytes__nf4 is no JSON object"),
        ("nf4", ".weight", narrower, r"up_proj\.weight has shape"),
    ],
)
def test_tensors_that_do_not_fit_are_refused_by_name(
    kind: str, suffix: str, edit: Edit, message: str, made: dict[str, Path], tmp_path: Path
) -> None:
    path = tmp_path / kind
    path.mkdir()
    (path / "config.json").write_bytes((made[kind] / "config.json").read_bytes())
    tensors = load_file(made[kind] / "model.safetensors")
    changed = edit(tensors.pop(NAME + suffix, torch.empty(0)))
    save_file(tensors if changed is None else {**tensors, NAME + suffix: changed}, path / "model.safetensors")
    with pytest.raises(CheckpointError, match=message):
        load(path)


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("gptq", {"bits": 3}, "bits is 3, expected 4 or 8"),
        ("gptq", {"bits": 4.0}, "bits is 4.0, expected an integer"),
        ("ct", {"ignore": ["re:(("]}, r"has the pattern '\(\(', which is not understood"),
        ("gptq", {"group_size": 48}, "quantised in groups of 48 inputs, expected 16, 32, a multiple of 64"),
        ("gptq", {"checkpoint_format": "marlin"}, 'checkpoint_format is "marlin", expected "gptq" or "gptq_v2"'),
        ("gptq", {"quant_method": "aqlm"}, 'quant_method is "aqlm", expected'),
        ("gptq", {"dynamic": {r"-:.*up_proj": {}}}, r"up_proj\.\w+ is stored, but quantization_config skips"),
        ("bitnet", {"quantization_mode": "online"}, 'quantization_mode is "online", expected "offline"'),
        ("awq", {"version": "gemv"}, 'version is "gemv", expected "gemm"'),
        ("ct", {"ignore": ["re:.*up_proj"]}, "has no group for model.layers.0.mlp.up_proj or ignores it"),
        (
            "ct",
            {"config_groups": {"a": {"targets": ["Linear"], "weights": {"type": "int", "num_bits": 3}}}},
            "num_bits",
        ),
        ("fp8", {"weight_block_size": [16]}, "weight_block_size is .*expected two integers"),
    ],
)
def test_configs_that_are_not_understood_are_refused(
    kind: str, changes: dict[str, Any], message: str, made: dict[str, Path], tmp_path: Path
) -> None:
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((made[kind] / name).read_bytes())
    edit_config(tmp_path, quantization_config={**FORMATS[kind][1], **changes})
    with pytest.raises(OctavoError, match=message):
        load(tmp_path)
