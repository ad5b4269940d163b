"""Where the time of a decode step goes: in kernels of the GPU, and in functions of the host.

`python -m benchmarks.gpu.steps [--model qwen3-0.6b] [--batch 1] [--launches ordinary overlapping]`
"""

from __future__ import annotations

import argparse
import cProfile
import pstats

import torch

from benchmarks.gpu.figures import opened, prompts_of, timed
from benchmarks.gpu.overlap import LAUNCHERS, device_with
from benchmarks.models import CONFIGS
from octavo import LLM


def profile(llm: LLM, vocab_size: int, batch: int, num_tokens: int) -> None:
    """Print where the time of the decode steps of a batch goes."""
    prompts = prompts_of([128] * batch, vocab_size)
    timed(llm, prompts, num_tokens)
    taken = timed(llm, prompts, num_tokens)
    print(f"\nbatch {batch}: {taken / num_tokens * 1e3:.3f} ms a step")
    host = cProfile.Profile()
    host.enable()
    timed(llm, prompts, num_tokens)
    host.disable()
    pstats.Stats(host).sort_stats("tottime").print_stats(28)
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as found:
        timed(llm, prompts, 40)
    print(found.key_averages().table(sort_by="self_device_time_total", row_limit=24, max_name_column_width=60))


def main() -> None:
    """Print both, the largest first."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen3-0.6b", choices=CONFIGS)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 64])
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--launches", nargs="+", default=["ordinary"], choices=LAUNCHERS)
    parser.add_argument("--device", default="cuda")
    arguments = parser.parse_args()
    for launches in arguments.launches:
        with device_with(launches), opened(arguments.model, arguments.device, {}) as llm:
            print(f"\nlaunches: {launches}")
            for batch in arguments.batch:
                profile(llm, CONFIGS[arguments.model]["vocab_size"], batch, arguments.tokens)


if __name__ == "__main__":
    main()
