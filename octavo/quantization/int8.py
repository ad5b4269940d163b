"""8-bit weights, a scale per output channel, times 8-bit activations, a scale per token; made at load."""

from __future__ import annotations

from octavo.quantization.method import FromPlain

METHODS = (FromPlain("int8", "prepare_int8"),)
