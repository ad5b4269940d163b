"""Two ranks beside one, where there are two GPUs: the same bits, and tokens per second."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.figures import CONFIGS, write_config
from octavo import LLM, SamplingParams

WAYS: dict[str, dict[str, Any]] = {
    "one rank": {},
    "tensor ranks": {"tensor_parallel_size": 2},
    "tensor ranks, launched by the host": {"tensor_parallel_size": 2, "enforce_eager": True},
    "stages": {"pipeline_parallel_size": 2},
}


def ranks(model: str = "qwen3-0.6b") -> Iterator[dict[str, Any]]:
    """Yield for each way whether tokens and log-probabilities are those of one rank, and tokens per second."""
    if torch.cuda.device_count() < 2:
        yield {"ranks": f"not run: {torch.cuda.device_count()} GPU, and two are needed"}
        return
    prompts: Any = [{"prompt_token_ids": [(row + 7 * i) % 1000 for i in range(128)]} for row in range(16)]
    params = SamplingParams(max_tokens=64, temperature=0.8, seed=1, logprobs=1, ignore_eos=True)
    expected: list[Any] | None = None
    with tempfile.TemporaryDirectory() as folder:
        path = str(write_config(Path(folder) / model, CONFIGS[model]))
        common: dict[str, Any] = {"device": "cuda", "load_format": "dummy", "dtype": "bfloat16", "max_model_len": 1024}
        for way, sizes in WAYS.items():
            begun = time.perf_counter()
            with LLM(path, batch_invariant=True, **common, **sizes) as llm:
                started = time.perf_counter() - begun
                llm.generate(prompts, params, use_tqdm=False)
                begun = time.perf_counter()
                found = [each.outputs for each in llm.generate(prompts, params, use_tqdm=False)]
                taken = time.perf_counter() - begun
            expected = expected or found
            num_tokens = sum(len(each.token_ids) for outputs in found for each in outputs)
            same = {"as_one_rank": found == expected, "tokens_per_s": num_tokens / taken}
            yield {"ranks": way, "start_s": started, **same}
