"""Microseconds per row of sampling, by the reference and by the compiled sampler: `python -m benchmarks.sampler`.

Logits are normal with a standard deviation of `--spread`; 5 gives distributions about as peaked as a language model's,
1 gives broad ones. The two take turns; medians over the repetitions, of processor time on one thread, of elapsed time
on several.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.cli.report import report
from octavo.config.schema import DeviceConfig
from octavo.core.sampling_params import SamplingParams
from octavo.devices.cpu.runtime import CpuRuntime
from octavo.devices.cpu.sampler import NativeSampler
from octavo.devices.device import open_device
from octavo.platform import Platform
from octavo.sampling.metadata import SamplingRow
from octavo.sampling.sampler import Sampler

KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "greedy_logprobs_5": {"temperature": 0.0, "logprobs": 5},
    "greedy_repetition": {"temperature": 0.0, "repetition_penalty": 1.1},
    "seeded": {},
    "seeded_logprobs_5": {"logprobs": 5},
    "seeded_top_p": {"top_p": 0.95},
    "seeded_top_k_top_p": {"top_k": 50, "top_p": 0.95},
    "seeded_top_k_20000": {"top_k": 20_000},
    "seeded_min_p": {"min_p": 0.05},
}


@dataclass(eq=False)
class BenchmarkSequence:
    """A prompt of 256 tokens and nothing else."""

    index: int
    params: SamplingParams
    tokens: NDArray[np.int32]
    num_prompt_tokens: int = 256
    end_token_ids: tuple[int, ...] = ()
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()
    line: int = 0

    def first_tokens(self, count: int) -> NDArray[np.int32]:
        return self.tokens[:count]

    def stored_tokens(self) -> Tensor:
        """Return its tokens, the only line there."""
        return torch.from_numpy(self.tokens).unsqueeze(0)


def measure(
    samplers: dict[str, Sampler],
    kind: str,
    num_rows: int,
    vocab_size: int,
    spread: float,
    repetitions: int,
    clock: Callable[[], float],
) -> dict[str, float]:
    """Median µs per row by sampler."""
    generator = torch.Generator().manual_seed(0)
    original = torch.randn(num_rows, vocab_size, generator=generator) * spread
    tokens = torch.randint(vocab_size, (256,), generator=generator, dtype=torch.int32).numpy()
    rows = [
        SamplingRow(BenchmarkSequence(0, SamplingParams(seed=row, **KINDS[kind]), tokens), 256)
        for row in range(num_rows)
    ]
    times: dict[str, list[float]] = {name: [] for name in samplers}
    logits = original.clone()
    # the first round warms up
    for _ in range(repetitions + 1):
        for name, sampler in samplers.items():
            logits.copy_(original)
            began = clock()
            sampler.sample(logits, rows)
            times[name].append(clock() - began)
    return {name: statistics.median(each[1:]) / num_rows * 1e6 for name, each in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 64])
    parser.add_argument("--vocab-size", type=int, nargs="+", default=[32_000, 152_000])
    parser.add_argument("--spread", type=float, default=5.0)
    parser.add_argument("--repetitions", type=int, default=20)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--instruction-set", default="auto")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    runtime = CpuRuntime.open(arguments.threads, arguments.instruction_set)
    samplers: dict[str, Sampler] = {
        "reference": open_device(DeviceConfig(device="reference", threads=1), Platform.detect()).sampler()
    }
    samplers["native"] = NativeSampler(runtime.cpu)
    clock = time.process_time if arguments.threads == 1 else time.perf_counter
    figures: dict[str, dict[str, float]] = {}
    for kind, vocab_size, num_rows in product(KINDS, arguments.vocab_size, arguments.rows):
        repetitions = max(5, arguments.repetitions // num_rows)
        found = measure(samplers, kind, num_rows, vocab_size, arguments.spread, repetitions, clock)
        figures[f"{kind}/{vocab_size}/{num_rows}"] = {name: round(value, 1) for name, value in found.items()}
    report("sampler", {"arguments": vars(arguments)}, {"us_per_row": figures})


if __name__ == "__main__":
    main()
