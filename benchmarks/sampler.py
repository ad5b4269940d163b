"""Microseconds per row that sampling costs: `python -m benchmarks.sampler`.

Logits are normal with a standard deviation of `--spread`; 5 gives distributions about as peaked as a language model's,
1 gives broad ones. Processor time, medians over the repetitions, on one thread.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from octavo.cli.report import report
from octavo.core.sampling_params import SamplingParams
from octavo.sampling.metadata import SamplingRow
from octavo.sampling.reference import ReferenceSampler

KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "greedy_logprobs_5": {"temperature": 0.0, "logprobs": 5},
    "seeded": {},
    "seeded_top_p": {"top_p": 0.95},
    "seeded_top_k_top_p": {"top_k": 50, "top_p": 0.95},
    "greedy_repetition": {"temperature": 0.0, "repetition_penalty": 1.1},
}


@dataclass(eq=False)
class BenchmarkSequence:
    """A prompt of 256 tokens and nothing else."""

    index: int
    params: SamplingParams
    known_tokens: NDArray[np.int64]
    num_prompt_tokens: int = 256
    end_token_ids: tuple[int, ...] = ()
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()


def measure(kind: str, num_rows: int, vocab_size: int, spread: float, repetitions: int) -> float:
    """Median µs per row."""
    generator = torch.Generator().manual_seed(0)
    original = torch.randn(num_rows, vocab_size, generator=generator) * spread
    tokens = torch.randint(vocab_size, (256,), generator=generator).numpy()
    rows = [
        SamplingRow(BenchmarkSequence(0, SamplingParams(seed=row, **KINDS[kind]), tokens)) for row in range(num_rows)
    ]
    sampler = ReferenceSampler()
    sampler.sample(original.clone(), rows)
    times = []
    for _ in range(repetitions):
        logits = original.clone()
        began = time.process_time()
        sampler.sample(logits, rows)
        times.append(time.process_time() - began)
    return statistics.median(times) / num_rows * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 64])
    parser.add_argument("--vocab-size", type=int, nargs="+", default=[32_000, 152_000])
    parser.add_argument("--spread", type=float, default=5.0)
    parser.add_argument("--repetitions", type=int, default=20)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    figures = {
        f"{kind}/{vocab_size}/{num_rows}": round(
            measure(kind, num_rows, vocab_size, arguments.spread, max(3, arguments.repetitions // num_rows)), 1
        )
        for kind in KINDS
        for vocab_size in arguments.vocab_size
        for num_rows in arguments.rows
    }
    report("sampler", {"arguments": vars(arguments)}, {"us_per_row": figures})


if __name__ == "__main__":
    main()
