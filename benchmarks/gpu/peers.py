"""transformers on the GPU: as it is, compiled with a static cache, and with continuous batching.

`python -m benchmarks.gpu.peers [--model qwen3-0.6b] [--batch 1 64]` prints JSON lines with the time of a decode step,
which our decode steps (`benchmarks.gpu.figures`) are compared with. Weights are random numbers.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from benchmarks.gpu.figures import PROMPT
from benchmarks.gpu.kept import kept
from benchmarks.models import CONFIGS

RUNS: Final = 3
FEW, MANY = 8, 40
"""Tokens of the two answers whose times are compared."""

Generate = Callable[[Tensor, int], object]
"""Generates so many tokens for each prompt of [batch, tokens]."""


def step_ms(generate: Generate, ids: Tensor) -> float:
    """Return the time of a decode step: the difference of two answers' times, over that of their lengths."""

    def timed(count: int) -> float:
        begun = time.perf_counter()
        generate(ids, count)
        if ids.is_cuda:
            torch.cuda.synchronize()
        return time.perf_counter() - begun

    for count in (FEW, MANY, FEW):
        timed(count)
    return statistics.median((timed(MANY) - timed(FEW)) / (MANY - FEW) for _ in range(RUNS)) * 1e3


def ways(config: dict[str, Any], device: str) -> Iterator[tuple[str, Generate]]:
    """Yield ways of transformers to generate."""

    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), dtype=torch.bfloat16).eval()

    def whole(ids: Tensor, count: int, **options: Any) -> object:
        given = {"max_new_tokens": count, "min_new_tokens": count, "do_sample": False, **options}
        return model.generate(ids, attention_mask=torch.ones_like(ids), **given)

    yield "as it is", whole
    yield "static cache, compiled", lambda ids, count: whole(ids, count, cache_implementation="static")

    def batched(ids: Tensor, count: int) -> object:
        asked = GenerationConfig(max_new_tokens=count, do_sample=False, eos_token_id=-1)
        found = model.generate_batch(ids.tolist(), generation_config=asked, persistent_manager=True)
        assert all(len(each.generated_tokens) == count for each in found.values())
        return found

    yield "continuous batching", batched


def steps(model: str, batches: Sequence[int], device: str) -> Iterator[dict[str, Any]]:
    """Yield the time of a step in every way."""
    config = dict(CONFIGS[model])
    for way, generate in ways(config, device):
        for batch in batches:
            about = {"peer": f"transformers, {way}", "model": model, "batch": batch}
            ids = torch.randint(10, config["vocab_size"], (batch, PROMPT), device=device)
            yield from kept(about, lambda run=generate, ids=ids: [{"step_ms": step_ms(run, ids)}])


def main() -> None:
    """Print them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen3-0.6b", choices=CONFIGS)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 64])
    parser.add_argument("--device", default="cuda")
    arguments = parser.parse_args()
    for line in steps(arguments.model, arguments.batch, arguments.device):
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
