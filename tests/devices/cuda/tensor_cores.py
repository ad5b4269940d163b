"""The sums of a product as tensor cores of Hopper make them: 16 inputs at a time, in ascending order.

NumPy's products, which Triton's interpreter takes, have an order that changes with the shape of a tile. On a GPU tiles
of 16 rows and of 128, by both kinds of instructions, gave the same bits.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import triton.runtime.interpreter as interpreter

INPUTS = 16


def install() -> None:
    """Let the interpreter multiply so, in this process."""
    builder: Any = interpreter.InterpreterBuilder
    plain = builder.create_dot

    def create_dot(self: Any, a: Any, b: Any, sums: Any, *options: Any) -> Any:
        if sums.data.dtype != np.float32:
            return plain(self, a, b, sums, *options)
        found = sums.data
        with np.errstate(over="ignore", invalid="ignore"):
            for first in range(0, a.data.shape[-1], INPUTS):
                here = slice(first, first + INPUTS)
                added = a.data[..., here].astype(np.float64) @ b.data[..., here, :].astype(np.float64)
                found = (found.astype(np.float64) + added).astype(np.float32)
        return interpreter.TensorHandle(found, sums.dtype.scalar)

    builder.create_dot = create_dot
