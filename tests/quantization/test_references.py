"""Weights are, bit by bit, what the libraries that write a format make of the same bytes."""

from __future__ import annotations

import importlib
import json
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from octavo.config.section import Section
from octavo.gguf.reader import TENSOR_TYPES
from octavo.models.weight_files import DTYPE_NAMES
from octavo.quantization.gguf import BLOCK_TYPES, dequantized
from octavo.quantization.registry import stored_format
from octavo.quantization.stored import StoredWeight

gguf: Any = importlib.import_module("gguf")
NAME = "model.layers.0.mlp.up_proj"
INTEGERS = ("W4A16", "W4A16_ASYM", "W8A16", "W8A8")
SCHEMES = (*INTEGERS, "FP8", "FP8_DYNAMIC", "FP8_BLOCK", "MXFP4A16", "NVFP4A16")


@dataclass(frozen=True)
class Stored:
    """A tensor in memory, as a file would have it."""

    name: str
    tensor: Tensor

    @property
    def dtype(self) -> str:
        return DTYPE_NAMES[self.tensor.dtype]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape)

    def values(self, parts: object) -> Tensor:
        return self.tensor


def opened(config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> StoredWeight:
    section = Section(json.loads(json.dumps(config, default=str)), "config.json", "quantization_config.")
    parts: Any = {f".{suffix}": Stored(f"{NAME}.{suffix}", each) for suffix, each in tensors.items()}
    return stored_format(section).open(NAME, parts)


def same_bits(found: Tensor, expected: Tensor) -> bool:
    return found.dtype == expected.dtype and torch.equal(
        found.view(torch.uint8), expected.contiguous().view(torch.uint8)
    )


def random_weight(outputs: int = 256, inputs: int = 384) -> Tensor:
    weight = torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(1))
    weight[3] = 0.0
    weight[5, 7] = 80.0
    return weight


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", SCHEMES)
def test_weights_of_compressed_tensors_are_its_own(name: str, dtype: torch.dtype) -> None:
    library: Any = importlib.import_module("compressed_tensors")
    compressors: Any = importlib.import_module("compressed_tensors.compressors")
    formats: Any = importlib.import_module("compressed_tensors.compressors.format")
    helpers: Any = importlib.import_module("compressed_tensors.quantization.utils.helpers")
    scheme = library.quantization.preset_name_to_scheme(name, ["Linear"])
    kind = formats.infer_module_format(torch.nn.Linear, scheme)
    weight = random_weight().to(dtype)
    tensors = {"weight": weight, **scales_of(helpers, scheme.weights, weight)}
    compressor = compressors.BaseCompressor.get_value_from_registry(kind.value)
    written = compressor.compress(tensors, scheme)
    expected = compressor.decompress(dict(written), scheme)["weight"]
    config = library.quantization.QuantizationConfig(config_groups={"group_0": scheme}, format=kind.value)
    stored = opened(config.to_dict(), written)
    assert same_bits(stored.rows("weight").to(expected.dtype), expected)
    assert same_bits(stored.rows("weight", slice(9, 50)).to(expected.dtype), expected[9:50])
    assert stored.spec is not None
    assert stored.spec.is_plain == name.startswith("FP8")
    coded = {each: stored.rows(each) for each in stored.read if each != "weight"}
    assert same_bits(stored.spec.dequantized(coded).to(expected.dtype), expected)


def scales_of(helpers: Any, args: Any, weight: Tensor) -> dict[str, Tensor]:
    """Scales and zero points as the library's calibration without data makes them."""
    outputs, inputs = weight.shape
    rows, columns = args.block_structure or (1 if args.strategy != "tensor" else outputs, args.group_size or inputs)
    blocks = weight.view(outputs // rows, rows, inputs // columns, columns)
    least, most = blocks.amin((1, 3)), blocks.amax((1, 3))
    own: dict[str, Tensor] = {}
    if args.strategy == "tensor_group":
        own["weight_global_scale"] = helpers.generate_gparam(weight.amin().float(), weight.amax().float()).reshape(1)
    scales, zeros = helpers.calculate_qparams(least, most, args, own.get("weight_global_scale"))
    return {**own, "weight_scale": scales, "weight_zero_point": zeros}


@pytest.mark.parametrize("is_nested", [False, True])
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
def test_four_bits_of_bitsandbytes_are_its_own(kind: str, is_nested: bool) -> None:
    functional: Any = importlib.import_module("bitsandbytes.functional")
    weight = random_weight()
    codes, state = functional.quantize_4bit(weight, blocksize=64, quant_type=kind, compress_statistics=is_nested)
    expected = functional.dequantize_4bit(codes, state) + 0.0  # with AVX2 it makes -0.0 of a code of FP4
    parts = {"weight": codes} | {f"weight.{key}": each for key, each in state.as_dict(packed=True).items()}
    stored = opened({"quant_method": "bitsandbytes", "load_in_4bit": True}, parts)
    assert same_bits(stored.rows("weight"), expected)
    assert same_bits(stored.rows("weight", slice(9, 50)), expected[9:50])


@pytest.mark.parametrize("kind", ["bitlinear", "autobitlinear"])
def test_ternary_codes_are_those_of_transformers(kind: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch.compile, which the module imports
        library: Any = importlib.import_module("transformers.integrations.bitnet")
    codes = torch.randint(-1, 2, (64, 40), generator=torch.Generator().manual_seed(1)).float()
    written = {"weight": library.pack_weights(codes.clone()), "weight_scale": torch.tensor([2.375]).bfloat16()}
    stored = opened({"quant_method": "bitnet", "linear_class": kind}, written)
    expected = codes * (1 / torch.tensor(2.375) if kind == "bitlinear" else 2.375)
    assert same_bits(stored.rows("weight"), expected)
    assert same_bits(stored.rows("weight", slice(9, 50)), expected[9:50])


def float16_places(kind: str) -> list[int]:
    """Where float16 numbers are in a block."""
    places = {"Q2_K": [80, 82], "Q3_K": [108], "Q6_K": [208], "TQ1_0": [52], "TQ2_0": [64]}
    return places.get(kind, [0, 2] if kind in ("Q4_1", "Q5_1", "Q4_K", "Q5_K") else [0])


@pytest.mark.parametrize("kind", [each for each in BLOCK_TYPES if each != "Q8_K"])
def test_values_of_blocks_are_those_of_gguf(kind: str) -> None:
    (_, _, num_bytes) = next(each for each in TENSOR_TYPES.values() if each[0] == kind)
    blocks = np.random.default_rng(0).integers(0, 256, (64, 4, num_bytes), dtype=np.uint8)
    if kind == "IQ1_M":
        blocks[..., 55] &= 0xBF  # the highest bits of a scale, which make infinities
    elif kind == "MXFP4":
        blocks[..., 0] %= 250
    else:
        blocks[..., [place + 1 for place in float16_places(kind)]] &= 0xBF
    rows = blocks.reshape(64, -1)
    expected = gguf.dequantize(rows, gguf.GGMLQuantizationType[kind])
    assert np.isfinite(expected).all()
    # of MXFP4 gguf has no negative zero, so zeros may have another sign
    assert torch.equal(dequantized(BLOCK_TYPES[kind], torch.from_numpy(rows)), torch.from_numpy(expected))


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "TQ1_0", "TQ2_0", "MXFP4"])
def test_values_that_gguf_quantises_are_those_that_it_reads(kind: str) -> None:
    number = gguf.GGMLQuantizationType[kind]
    rows = gguf.quantize(random_weight(8, 512).numpy(), number)
    expected = torch.from_numpy(gguf.dequantize(rows, number))
    assert torch.equal(dequantized(BLOCK_TYPES[kind], torch.from_numpy(rows)), expected)
