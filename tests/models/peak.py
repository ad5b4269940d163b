"""The memory that loading a model takes, measured in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.fakes.checkpoints import make_checkpoint

needs_peak = pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(), reason="needs Linux's account of a process's memory"
)
SIZES = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 8, "vocab_size": 4000}
_MEASURE = """
import importlib, sys
from pathlib import Path

def memory(key):
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key))
    return int(line.split()[1]) * 1024

small, large = map(Path, sys.argv[1:3])
load = importlib.import_module(sys.argv[3]).load_for_peak
load(small, *sys.argv[4:])
before = memory("VmRSS")
Path("/proc/self/clear_refs").write_text("5")
model = load(large, *sys.argv[4:])
weights = sum(tensor.nbytes for tensor in model.state().values())
print(weights, memory("VmHWM") - before, memory("VmRSS") - before)
"""


def peak_of_loading(folder: Path, module: str, *options: str, **sizes: bool) -> tuple[int, int, int, int]:
    """Return bytes: of the checkpoint, of the model's weights, and what the process has more at the most, and then.

    module: its function `load_for_peak` loads a path with `options`. sizes: of the checkpoint, beside SIZES.
    """
    large = make_checkpoint("llama", folder / "large", **SIZES, **sizes)
    small = make_checkpoint("llama", folder / "small")
    command = [sys.executable, "-c", _MEASURE, str(small), str(large), module, *options]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    weights, peak, after = map(int, done.stdout.split())
    return (large / "model.safetensors").stat().st_size, weights, peak, after
