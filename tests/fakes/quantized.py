"""Quantised checkpoints that tests write, each format by a few lines that follow its specification."""

from __future__ import annotations

import json
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


def compressed_tensors(
    bits: int, group: int, *, packing: bool = True, symmetric: bool = True, ordered: bool = False
) -> tuple[Encode, Any]:
    """Integers as llm-compressor writes them; with `ordered`, inputs of a group are anywhere."""

    def encode(name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        shuffle = torch.Generator().manual_seed(len(name))
        places = torch.randperm(weight.shape[1], generator=shuffle) if ordered else torch.arange(weight.shape[1])
        codes, scales, zeros = rounded(weight[:, places], bits, group, torch.bfloat16, symmetric=symmetric)
        meaning, codes = meant(codes, scales, zeros)[:, places.argsort()], codes[:, places.argsort()]
        half = 2 ** (bits - 1)
        parts = {".weight_scale": scales}
        if ordered:
            parts[".weight_g_idx"] = (torch.arange(weight.shape[1]) // group)[places.argsort()].int()
        if packing:
            parts[".weight_packed"] = packed(codes.long() + half, bits)
            parts[".weight_shape"] = torch.tensor(weight.shape)
        else:
            parts[".weight"] = codes
        if not symmetric:
            parts[".weight_zero_point"] = packed(zeros + half, bits, dim=0) if packing else zeros.to(torch.int8)
        return parts, meaning

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


def gptq(
    bits: int, group: int, *, symmetric: bool = True, ordered: bool = False, version: int = 1
) -> tuple[Encode, dict[str, Any]]:
    """Words along the inputs; with `ordered`, inputs of a group are anywhere."""

    def encode(name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        inputs = weight.shape[1]
        # inputs are the same for weights that are multiplied with the same x
        shuffle = torch.Generator().manual_seed(inputs if "o_proj" not in name else 3)
        places = torch.randperm(inputs, generator=shuffle) if ordered else torch.arange(inputs)
        codes, scales, zeros = rounded(weight[:, places], bits, group, torch.float16, symmetric=symmetric)
        half, back = 2 ** (bits - 1), places.argsort()
        parts = {
            ".qweight": packed((codes.long() + half)[:, back].t(), bits, dim=0),
            ".qzeros": packed((zeros + half - int(version == 1)).t() % (2 * half), bits),
            ".scales": scales.t().contiguous(),
            ".g_idx": (torch.arange(inputs) // (group or inputs))[back].int(),
        }
        return parts, meant(codes, scales, zeros)[:, back]

    config = {"quant_method": "gptq", "bits": bits, "group_size": group or -1, "sym": symmetric, "desc_act": ordered}
    return encode, {**config, "checkpoint_format": "gptq" if version == 1 else "gptq_v2"}


def awq(group: int) -> tuple[Encode, dict[str, Any]]:
    """Words along the outputs, the numbers of a word in the order of AWQ's kernel."""
    order = [0, 2, 4, 6, 1, 3, 5, 7]

    def encode(name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        codes, scales, zeros = rounded(weight, 4, group, torch.float16, symmetric=False)

        def words(numbers: Tensor) -> Tensor:
            turned = numbers.t().reshape(numbers.shape[1], -1, 8)[..., order]
            return packed(turned.flatten(1), 4)

        parts = {".qweight": words(codes.long() + 8), ".qzeros": words(zeros + 8), ".scales": scales.t().contiguous()}
        return parts, meant(codes, scales, zeros)

    config = {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True, "version": "gemm"}
    return encode, {**config, "modules_to_not_convert": None}


def fp8(rows: int, columns: int, suffix: str) -> Encode:
    """F8_E4M3 with a scale for so many values; 0 for all."""

    def encode(name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        outputs, inputs = weight.shape
        high, wide = rows or outputs, columns or inputs
        scales = torch.zeros(-(-outputs // high), -(-inputs // wide))
        for r, c in torch.cartesian_prod(torch.arange(len(scales)), torch.arange(scales.shape[1])).tolist():
            scales[r, c] = weight[r * high : (r + 1) * high, c * wide : (c + 1) * wide].abs().max() / 448
        whole = scales.repeat_interleave(high, 0)[:outputs].repeat_interleave(wide, 1)[:, :inputs]
        codes = (weight / whole).to(torch.float8_e4m3fn)
        return {".weight": codes, suffix: scales if rows or columns else scales[0]}, codes.float() * whole

    return encode


E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])


def fp4(weight: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """Two codes of E2M1 in each byte, and the weight that they mean; scales [..., groups]."""
    groups = weight.view(*scales.shape, -1)
    codes = (groups[..., None] / scales[..., None, None] - E2M1).abs().argmin(-1).to(torch.uint8)
    meaning = (E2M1[codes.long()] * scales[..., None]).view(weight.shape)
    codes = codes.view(weight.shape)
    return codes[..., 0::2] | (codes[..., 1::2] << 4), meaning


def exponents(weight: Tensor) -> Tensor:
    """Exponents of 8 bits for groups of 32."""
    largest = weight.view(*weight.shape[:-1], -1, 32).abs().amax(-1).clamp_min(1e-20)
    return (largest.log2().floor() - 2 + 127).to(torch.uint8)


def mxfp4(name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """MXFP4 as compressed-tensors stores it."""
    scales = exponents(weight)
    codes, meaning = fp4(weight, torch.exp2(scales.float() - 127))
    return {".weight_packed": codes, ".weight_scale": scales}, meaning


def nvfp4(name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """NVFP4 as compressed-tensors stores it: the scale of a group is divided by that of the tensor."""
    whole = 448 * 6 / weight.abs().max()
    scales = (weight.view(len(weight), -1, 16).abs().amax(-1) / 6 * whole).to(torch.float8_e4m3fn)
    codes, meaning = fp4(weight, scales.float() / whole)
    return {".weight_packed": codes, ".weight_scale": scales, ".weight_global_scale": whole[None]}, meaning


def gpt_oss(name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """MXFP4 of stacked experts, whose plain weights are [experts, inputs, outputs]."""
    turned = weight.transpose(1, 2).contiguous()
    scales = exponents(turned)
    codes, meaning = fp4(turned, torch.exp2(scales.float() - 127))
    return {"_blocks": codes.view(*scales.shape, 16), "_scales": scales}, meaning.transpose(1, 2)


def floats(bits: int, strategy: str, group: int | None = None, block: list[int] | None = None) -> dict[str, Any]:
    """The config of compressed-tensors for floats."""
    weights = {"num_bits": bits, "type": "float", "strategy": strategy, "group_size": group, "block_structure": block}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    return {"quant_method": "compressed-tensors", "config_groups": groups, "ignore": ["re:.*lm_head"]}


NF4 = torch.tensor(
    [
        *(-1.0, -0.6961928, -0.52507305, -0.39491749, -0.28444138, -0.18477343, -0.09105004, 0.0),
        *(0.0795803, 0.1609302, 0.2461123, 0.33791524, 0.44070983, 0.562617, 0.72295684, 1.0),
    ]
)


def bitsandbytes(block: int, *, nested: bool) -> Encode:
    """NF4 over the flattened weight; `nested` for scales of 8 bits."""

    def encode(name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        flat = torch.nn.functional.pad(weight.flatten(), (0, -weight.numel() % block)).view(-1, block)
        scales = flat.abs().amax(1)
        state: dict[str, Any] = {"quant_type": "nf4", "blocksize": block, "dtype": "float32", "shape": [*weight.shape]}
        parts = {".weight.quant_map": NF4.clone()}
        if nested:
            offset = float(scales.mean())
            table, left = torch.linspace(-1, 1, 256), scales - offset
            outer = torch.nn.functional.pad(left, (0, -len(left) % 256)).view(-1, 256).abs().amax(1)
            of_blocks = outer.repeat_interleave(256)[: len(left)]
            codes = (left[:, None] / of_blocks[:, None] - table).abs().argmin(1)
            scales = table[codes] * of_blocks + offset
            parts.update({".weight.absmax": codes.to(torch.uint8), ".weight.nested_absmax": outer})
            parts[".weight.nested_quant_map"] = table
            state.update({"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": offset})
        else:
            parts[".weight.absmax"] = scales
        codes = (flat[..., None] / scales[:, None, None] - NF4).abs().argmin(-1).to(torch.uint8)
        meaning = (NF4[codes.long()] * scales[:, None]).flatten()[: weight.numel()].view(weight.shape)
        flat_codes = codes.flatten()[: weight.numel()]
        parts[".weight"] = ((flat_codes[0::2] << 4) | flat_codes[1::2])[:, None]
        text = json.dumps(state).encode()
        parts[".weight.quant_state.bitsandbytes__nf4"] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        return parts, meaning

    return encode


def llm_int8(name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """Bytes with the largest magnitude of each row."""
    most = weight.abs().amax(1)
    codes = (weight / most[:, None] * 127).round().to(torch.int8)
    return {".weight": codes, ".SCB": most}, codes.float() * (most / 127)[:, None]


def bitnet(*, divides: bool) -> Encode:
    """Codes of BitNet, four to a byte, and the number by which they are divided or multiplied."""

    def encode(name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        scale = weight.abs().mean()
        codes = (weight / scale).round().clamp(-1, 1)
        stored = (1 / scale if divides else scale)[None]
        quarters = (codes + 1).to(torch.uint8).chunk(4)
        rows = quarters[0] | quarters[1] << 2 | quarters[2] << 4 | quarters[3] << 6
        return {".weight": rows, ".weight_scale": stored}, codes * (1 / stored if divides else stored)

    return encode
