"""Where the time of a decode step goes: in kernels of the GPU, and in functions of the host.

`python -m benchmarks.gpu.steps [--model qwen3-0.6b] [--batch 1]`
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.figures import prompts_of, timed
from benchmarks.models import CONFIGS, write_config
from octavo import LLM


def main() -> None:
    """Print both, the largest first."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen3-0.6b", choices=CONFIGS)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 64])
    parser.add_argument("--tokens", type=int, default=200)
    arguments = parser.parse_args()
    common: dict[str, Any] = {"load_format": "dummy", "dtype": "bfloat16", "max_model_len": 4096}
    with tempfile.TemporaryDirectory() as folder:
        path = write_config(Path(folder) / arguments.model, CONFIGS[arguments.model])
        with LLM(str(path), device="cuda", **common) as llm:
            for batch in arguments.batch:
                prompts = prompts_of([128] * batch, CONFIGS[arguments.model]["vocab_size"])
                timed(llm, prompts, arguments.tokens)
                taken = timed(llm, prompts, arguments.tokens)
                print(f"\nbatch {batch}: {taken / arguments.tokens * 1e3:.3f} ms a step")
                host = cProfile.Profile()
                host.enable()
                timed(llm, prompts, arguments.tokens)
                host.disable()
                pstats.Stats(host).sort_stats("tottime").print_stats(28)
                activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
                with torch.profiler.profile(activities=activities) as found:
                    timed(llm, prompts, 40)
                print(
                    found.key_averages().table(sort_by="self_device_time_total", row_limit=24, max_name_column_width=60)
                )


if __name__ == "__main__":
    main()
