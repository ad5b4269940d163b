"""4-bit weights in groups of 64 or 128 inputs that share a scale, times 8-bit activations; made at load."""

from __future__ import annotations

from octavo.quantization.method import FromPlain

METHODS = (FromPlain("int4", "prepare_int4"), FromPlain("int4-g128", "prepare_int4_g128"))
