"""The device CUDA where there is none: kernels run in Triton's interpreter, on tensors of the CPU."""

from __future__ import annotations

import os

# read by Triton when kernels are defined, so before the first of them is imported
os.environ["TRITON_INTERPRET"] = "1"
