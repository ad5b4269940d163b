"""The device CUDA where there is none: kernels run in Triton's interpreter, on tensors of the CPU."""

from __future__ import annotations

import os
from importlib.util import find_spec

# read by Triton when kernels are defined, so before the first of them is imported
os.environ["TRITON_INTERPRET"] = "1"

if find_spec("triton") is not None:
    from tests.devices.cuda import quick_interpreter, tensor_cores

    quick_interpreter.install()
    tensor_cores.install()
