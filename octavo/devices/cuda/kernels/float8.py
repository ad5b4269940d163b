"""Floats of 8 bits (E4M3), decoded without instructions that only some GPUs have."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def factors(codes, TYPE: tl.constexpr):
    """Return the 256th part of what codes stand for: its bits are those of a float16."""
    wide = codes.to(tl.int16)
    return (((wide & 0x80) << 8) | ((wide & 0x7F) << 7)).to(tl.float16, bitcast=True).to(TYPE)
