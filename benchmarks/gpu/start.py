"""Where the time of a start goes on a GPU: of imports and libraries in processes of their own, and of an engine."""

from __future__ import annotations

import cProfile
import pstats
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from octavo import LLM

ALONE: Final = {
    "python": "",
    "torch": "import torch",
    "torch, the GPU": "import torch; torch.zeros(1, device='cuda')",
    "torch, the GPU, cuBLAS": "import torch; x = torch.zeros(64, 64, device='cuda'); x @ x; torch.cuda.synchronize()",
    "torch, Triton": "import torch, triton",
    "octavo's worker": "import octavo.worker.worker",
    "torch and the GPU meanwhile": "from octavo.devices.cuda.driver import open_ahead; open_ahead(0); "
    "import torch; torch.zeros(1, device='cuda')",
    "4 GiB pinned": "import torch; torch.empty(4 << 30, dtype=torch.uint8, pin_memory=True)",
    "4 GiB pinned, touched by 8 threads": "import os; os.environ['PYTORCH_CUDA_ALLOC_CONF'] = "
    "'pinned_use_cuda_host_register:True,pinned_num_register_threads:8'; import torch; "
    "torch.empty(4 << 30, dtype=torch.uint8, pin_memory=True)",
}
"""Programs, each of which does a part of what a start does, or would do."""
LINES: Final = 40


def start(model: str = "octavo-tiny") -> Iterator[dict[str, Any]]:
    """Yield the time of each program, and of the functions that take the most time in the start of an engine, with what
    they call and without, the first start of this process and the second."""
    for name, code in ALONE.items():
        begun = time.perf_counter()
        code_of = subprocess.run([sys.executable, "-c", code], check=False).returncode
        failed = {"failed": code_of} if code_of else {}  # the others are still of use
        yield {"start": name, "s": round(time.perf_counter() - begun, 2), **failed}
    for turn in ("first", "again"):
        profile, begun = cProfile.Profile(), time.perf_counter()
        profile.enable()
        with LLM(model, dtype="bfloat16", device="cuda"):
            profile.disable()
            yield {"start": f"engine, {turn}", "s": round(time.perf_counter() - begun, 2)}
        found: dict[Any, Any] = vars(pstats.Stats(profile))["stats"]
        longest = sorted(found.items(), key=lambda each: -each[1][3])[:LINES]
        for (path, line, function), (_, calls, own, whole, _) in longest:
            what = f"{Path(path).name}:{line} {function}"
            yield {"start": turn, "function": what, "calls": calls, "s": round(whole, 3), "own_s": round(own, 3)}
