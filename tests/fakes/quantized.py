"""Quantised checkpoints that tests write, each format by a few lines that follow its specification."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.fakes.checkpoints import edit_config

Encode = Callable[[str, Tensor], tuple[dict[str, Tensor], Tensor]]
"""(name, weight float32 [outputs, inputs]) → tensors by what stands behind the name, and the weight that they mean."""
LINEARS = r".*layers\..*_proj$"


def quantize(path: Path, encode: Encode, config: dict[str, Any], weights: str = LINEARS) -> Path:
    """Write the checkpoint again beside it, with the matching weights quantised, and change it to what these mean."""
    from safetensors.torch import load_file, save_file

    made = path.with_name(f"{path.name}-quantized")
    shutil.copytree(path, made)
    tensors = load_file(path / "model.safetensors")
    plain, coded = {}, {}
    for full, tensor in tensors.items():
        name = full.removesuffix(".weight")
        if not re.fullmatch(weights, name):
            plain[full] = coded[full] = tensor
            continue
        parts, plain[full] = encode(name, tensor.float())
        coded.update({f"{name}{suffix}": each.contiguous() for suffix, each in parts.items()})
    save_file({name: each.contiguous() for name, each in plain.items()}, path / "model.safetensors", {"format": "pt"})
    save_file(coded, made / "model.safetensors", {"format": "pt"})
    edit_config(made, quantization_config=config)
    return made


def packed(codes: Tensor, bits: int, dim: int = 1) -> Tensor:
    """Unsigned codes in words of 32 bits along a dimension, the first one lowest."""
    codes = codes.movedim(dim, -1).long()
    per_word = 32 // bits
    codes = torch.nn.functional.pad(codes, (0, -codes.shape[-1] % per_word))
    words = (codes.view(*codes.shape[:-1], -1, per_word) << (torch.arange(per_word) * bits)).sum(-1)
    return torch.where(words >= 2**31, words - 2**32, words).int().movedim(-1, dim).contiguous()


def rounded(
    weight: Tensor, bits: int, group: int, dtype: torch.dtype, *, symmetric: bool = True
) -> tuple[Tensor, Tensor, Tensor]:
    """Signed codes [outputs, inputs], scales and zero points [outputs, groups] of a weight."""
    groups = weight.view(len(weight), -1, group or weight.shape[1])
    half = 2 ** (bits - 1)
    if symmetric:
        scales = (groups.abs().amax(-1) / (half - 1)).to(dtype)
        zeros = torch.zeros_like(scales, dtype=torch.long)
    else:
        least, most = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
        scales = ((most - least) / (2 * half - 1)).to(dtype)
        zeros = (-half - least / scales.float()).round().long().clamp(-half, half - 1)
    codes = (groups / scales.float()[..., None]).round() + zeros[..., None]
    return codes.clamp(-half, half - 1).flatten(1).to(torch.int8), scales, zeros


def meant(codes: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
    """The weight that signed codes stand for."""
    groups = codes.float().view(*scales.shape, -1) - zeros.float()[..., None]
    return (groups * scales.float()[..., None]).flatten(1)


def compressed_tensors(bits: int, group: int, *, packing: bool = True, symmetric: bool = True) -> tuple[Encode, Any]:
    """Integers as llm-compressor writes them."""

    def encode(name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        codes, scales, zeros = rounded(weight, bits, group, torch.bfloat16, symmetric=symmetric)
        half = 2 ** (bits - 1)
        parts = {".weight_scale": scales}
        if packing:
            parts[".weight_packed"] = packed(codes.long() + half, bits)
            parts[".weight_shape"] = torch.tensor(weight.shape)
        else:
            parts[".weight"] = codes
        if not symmetric:
            parts[".weight_zero_point"] = packed(zeros + half, bits, dim=0) if packing else zeros.to(torch.int8)
        return parts, meant(codes, scales, zeros)

    weights = {
        "num_bits": bits,
        "type": "int",
        "symmetric": symmetric,
        "strategy": "group" if group else "channel",
        "group_size": group or None,
    }
    groups = {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}}
    config = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": groups}
    return encode, {**config, "ignore": ["lm_head"]}
