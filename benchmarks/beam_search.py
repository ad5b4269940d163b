"""Beam search beside as many independent samples: `python -m benchmarks.beam_search [--model DIRECTORY]`.

Both make `--width` sequences of `--output-len` tokens from the same prompts; they take turns, and the ratio is that of
their medians. What is more in a beam search: the likeliest tokens of each row, the choice of the survivors, and forks
with the copies of blocks that they bring.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from typing import Any

from octavo import LLM, SamplingParams
from octavo.cli.report import report


def measure(llm: LLM, prompts: list[list[int]], params: SamplingParams) -> float:
    """Seconds until all prompts are answered."""
    began = time.perf_counter()
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    seconds = time.perf_counter() - began
    for output in outputs:
        assert [len(each.token_ids) for each in output.outputs] == [params.max_tokens] * params.n, output.error
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="octavo-tiny")
    parser.add_argument("--width", type=int, default=4)
    parser.add_argument("--prompts", type=int, default=1, help="requests at once")
    parser.add_argument("--prompt-len", type=int, default=128)
    parser.add_argument("--output-len", type=int, default=64)
    parser.add_argument("--repetitions", type=int, default=7)
    args = parser.parse_args()
    source = random.Random(0)
    common: dict[str, Any] = {"n": args.width, "max_tokens": args.output_len, "ignore_eos": True}
    kinds = {
        "sampling": SamplingParams(seed=0, **common),
        "beam_search": SamplingParams(use_beam_search=True, temperature=0.0, **common),
    }
    seconds: dict[str, list[float]] = {name: [] for name in kinds}
    with LLM(model=args.model, enable_prefix_caching=False) as llm:
        vocab_size = llm.engine.ready.vocab_size
        for repetition in range(args.repetitions + 1):
            prompts = [[source.randrange(3, vocab_size) for _ in range(args.prompt_len)] for _ in range(args.prompts)]
            for name, params in kinds.items():
                took = measure(llm, prompts, params)
                if repetition > 0:  # the first one warms up
                    seconds[name].append(took)
    medians = {name: statistics.median(each) for name, each in seconds.items()}
    ms_per_step = {name: 1e3 * each / args.output_len for name, each in medians.items()}
    report(
        "beam_search",
        {"arguments": vars(args)},
        {"ms_per_step": ms_per_step, "ratio": medians["beam_search"] / medians["sampling"]},
    )


if __name__ == "__main__":
    main()
