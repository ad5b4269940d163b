"""The weight formats by their names in `--quantization`, and those of checkpoints by their `quant_method`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from octavo.config.section import Section
from octavo.errors import ConfigError, suggestion
from octavo.quantization.bitsandbytes import BitsAndBytes
from octavo.quantization.compressed_tensors import CompressedTensors
from octavo.quantization.floats import Fp8, Mxfp4
from octavo.quantization.gptq import AutoRound, Awq, Gptq
from octavo.quantization.method import UNQUANTIZED, FromPlain, WeightMethod
from octavo.quantization.stored import StoredFormat

METHODS: tuple[WeightMethod, ...] = (
    # a scale per output channel, times 8-bit activations with a scale per token
    FromPlain("int8", "prepare_int8"),
    # groups of 64 or 128 inputs that share a scale, times the same activations
    FromPlain("int4", "prepare_int4"),
    FromPlain("int4-g128", "prepare_int4_g128"),
)


def method_named(name: str | None) -> WeightMethod:
    """Return the method of `--quantization`; without a name weights stay as they are. Raises ConfigError."""
    if name is None:
        return UNQUANTIZED
    methods = {each.name: each for each in METHODS}
    if name not in methods:
        known = ", ".join(methods)
        raise ConfigError(f"quantization is {name}, must be one of {known}{suggestion(name, methods)}")
    return methods[name]


FORMATS: Final[Mapping[str, Callable[[Section], StoredFormat]]] = {
    "auto-round": AutoRound,
    "awq": Awq,
    "bitsandbytes": BitsAndBytes,
    "compressed-tensors": CompressedTensors,
    "fbgemm_fp8": Fp8,
    "fp8": Fp8,
    "gptq": Gptq,
    "intel/auto-round": AutoRound,
    "mxfp4": Mxfp4,
}


def stored_format(section: Section) -> StoredFormat:
    """Return the format of a checkpoint by its `quantization_config`. Raises CheckpointError, UnsupportedModel."""
    return FORMATS[section.expect("quant_method", *FORMATS, default=None)](section)
