"""A decode loop of transformers on the GPU, with a static cache and compiled: what our decode steps are compared with.

`python -m benchmarks.gpu.peers [--model qwen3-0.6b]` prints JSON lines. Weights are random numbers.
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.gpu.figures import FEW, MANY, PROMPT, RUNS
from benchmarks.models import CONFIGS


def step_ms(model: Any, batch: int, vocab_size: int, **options: Any) -> float:
    """Return the time of a decode step: the difference of two answers' times, over that of their lengths."""
    ids = torch.randint(10, vocab_size, (batch, PROMPT), device="cuda")

    def timed(count: int) -> float:
        torch.cuda.synchronize()
        begun = time.perf_counter()
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=count,
            min_new_tokens=count,
            do_sample=False,
            **options,
        )
        torch.cuda.synchronize()
        return time.perf_counter() - begun

    for count in (FEW, MANY, FEW):
        timed(count)
    found = sorted((timed(MANY) - timed(FEW)) / (MANY - FEW) for _ in range(RUNS))
    return found[RUNS // 2] * 1e3


def main() -> None:
    """Print the time of a step, as it is and compiled."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen3-0.6b", choices=CONFIGS)
    name = parser.parse_args().model
    config = dict(CONFIGS[name])
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), dtype=torch.bfloat16).eval()
    ways: dict[str, dict[str, Any]] = {"as it is": {}, "static cache, compiled": {"cache_implementation": "static"}}
    for way, options in ways.items():
        for batch in (1, 64):
            taken = step_ms(model, batch, config["vocab_size"], **options)
            print(
                json.dumps({"peer": f"transformers, {way}", "model": name, "batch": batch, "step_ms": taken}),
                flush=True,
            )


if __name__ == "__main__":
    main()
