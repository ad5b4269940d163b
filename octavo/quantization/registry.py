"""The weight formats by their names in `--quantization`, and those of checkpoints by their `quant_method`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Final

from octavo.config.section import Section
from octavo.errors import ConfigError, suggestion
from octavo.ops.coded import CodeSpec
from octavo.ops.prepare_quantized import INT4, INT4_G128, INT8
from octavo.quantization.bitnet import BitNet
from octavo.quantization.bitsandbytes import BitsAndBytes
from octavo.quantization.compressed_tensors import CompressedTensors
from octavo.quantization.floats import Fp8, Mxfp4
from octavo.quantization.gguf import GGUF
from octavo.quantization.gptq import AutoRound, Awq, Gptq
from octavo.quantization.method import UNQUANTIZED, FromPlain, WeightMethod
from octavo.quantization.stored import StoredFormat

QUANTIZED: Final[Mapping[str, CodeSpec]] = {"int8": INT8, "int4": INT4, "int4-g128": INT4_G128}
"""The formats to which weights can be quantised while they are loaded."""


def method_named(name: str | None, activation_bits: int = 8, *, requantizes: bool = False) -> WeightMethod:
    """Return the method of `--quantization`; without a name weights stay as they are. Raises ConfigError."""
    if name is None:
        return UNQUANTIZED
    if name not in QUANTIZED:
        known = ", ".join(QUANTIZED)
        raise ConfigError(f"quantization is {name}, must be one of {known}{suggestion(name, QUANTIZED)}")
    return FromPlain(name, replace(QUANTIZED[name], activation_bits=activation_bits), requantizes)


FORMATS: Final[Mapping[str, Callable[[Section], StoredFormat]]] = {
    "auto-round": AutoRound,
    "awq": Awq,
    "bitnet": BitNet,
    "bitsandbytes": BitsAndBytes,
    "compressed-tensors": CompressedTensors,
    "gguf": GGUF,
    "fbgemm_fp8": Fp8,
    "fp8": Fp8,
    "gptq": Gptq,
    "intel/auto-round": AutoRound,
    "mxfp4": Mxfp4,
}


def stored_format(section: Section) -> StoredFormat:
    """Return the format of a checkpoint by its `quantization_config`. Raises CheckpointError, UnsupportedModel."""
    return FORMATS[section.expect("quant_method", *FORMATS, default=None)](section)
