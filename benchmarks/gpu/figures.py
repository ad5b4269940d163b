"""Whole engines on a GPU: decode and prefill as a share of what this GPU reaches, and nano-vllm's workload.

`python -m benchmarks.gpu.figures [--device cpu --models tiny-llama]` prints one JSON line per figure; `run_all` runs it
too. Weights are random numbers in the shapes of known models, made in memory.

A decode step cannot take less time than its weights and keys take to be read; a prompt no less than its products. The
floor is that at the bandwidth and the matrix rate that copies and products of this GPU reach in the same run.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from itertools import product
from math import prod
from pathlib import Path
from typing import Any, Final

from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu.kept import kept
from benchmarks.models import CONFIGS, tensor_shapes, write_config
from octavo import LLM, SamplingParams

RUNS: Final = 5
PROMPT, FEW, MANY = 128, 32, 160
"""Tokens of a prompt, and of two answers, whose difference in time is that of decode steps alone."""
WAYS: Final[Mapping[str, dict[str, Any]]] = {
    "as it is": {},
    "batch invariant": {"batch_invariant": True},
    "one step at a time": {"max_steps_in_flight": 1},
    "no graphs": {"enforce_eager": True},
}

BOTH: Final = ("as it is", "batch invariant")


@contextmanager
def opened(model: str, device: str, options: Mapping[str, Any]) -> Iterator[LLM]:
    """Open an engine of one of `CONFIGS` with random weights."""
    with tempfile.TemporaryDirectory() as folder:
        path = write_config(Path(folder) / model, CONFIGS[model])
        common: dict[str, Any] = {"load_format": "dummy", "dtype": "bfloat16", "max_model_len": 4096}
        with LLM(str(path), device=device, max_num_seqs=256, **common, **options) as llm:
            yield llm


def timed(llm: LLM, prompts: list[Any], max_tokens: int | list[int]) -> float:
    """Return the seconds that the prompts take."""
    counts = max_tokens if isinstance(max_tokens, list) else [max_tokens] * len(prompts)
    params = [SamplingParams(max_tokens=count, temperature=0.6, seed=1, ignore_eos=True) for count in counts]
    begun = time.perf_counter()
    llm.generate(prompts, params, use_tqdm=False)
    return time.perf_counter() - begun


def prompts_of(lengths: list[int], vocab_size: int) -> list[Any]:
    """Return prompts of random tokens that share no beginning."""
    chosen = random.Random(sum(lengths))
    return [{"prompt_token_ids": [chosen.randrange(10, vocab_size) for _ in range(length)]} for length in lengths]


def sizes(config: dict[str, Any]) -> tuple[int, int, int]:
    """Return the weights that a step reads, those that a prompt's token is multiplied with, and bytes of KV a token."""
    shapes = dict(tensor_shapes(config))
    total = sum(map(prod, shapes.values()))
    embedding = config["vocab_size"] * config["hidden_size"]
    read = total if config["tie_word_embeddings"] else total - embedding
    dim = config.get("head_dim", config["hidden_size"] // config["num_attention_heads"])
    kv_bytes = 2 * 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * dim
    return read, read - embedding, kv_bytes


def decode(llm: LLM, config: dict[str, Any], batch: int, limits: Mapping[str, float]) -> dict[str, Any]:
    """Return the time of a decode step, and the floor's share of it."""
    prompts = prompts_of([PROMPT] * batch, config["vocab_size"])
    timed(llm, prompts, MANY)
    found = []
    for _ in range(RUNS):
        few, many = timed(llm, prompts, FEW), timed(llm, prompts, MANY)
        found.append((many - few) / (MANY - FEW))
    step_s = statistics.median(found)
    read, _, kv_bytes = sizes(config)
    context = batch * (PROMPT + (FEW + MANY) / 2)
    floor_s = (2 * read + kv_bytes * context) / limits["bytes_per_s"]
    return {"batch": batch, "step_ms": step_s * 1e3, "floor_ms": floor_s * 1e3, "of_floor": floor_s / step_s}


def idle_of(llm: LLM, config: dict[str, Any], batch: int) -> dict[str, Any]:
    """Return the share of steady decode in which the GPU does nothing: neither a kernel nor a copy runs there."""
    prompts = prompts_of([PROMPT] * batch, config["vocab_size"])
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        timed(llm, prompts, MANY)
    spans = spans_on(DeviceType.CUDA, profiled.events() or ())
    first = spans[0][0] + (spans[-1][1] - spans[0][0]) / 2 if spans else 0.0  # prompts and the first steps are before
    return {"batch": batch, "gpu_idle": idle_share([each for each in spans if each[0] >= first])}


def spans_on(device: DeviceType, events: Iterable[Any]) -> list[tuple[float, float]]:
    """Return when each of a profile's events on a device began and ended, in order."""
    # each event has an object of its own for its device: they are equal, but not the same
    works = [each.time_range for each in events if each.device_type == device]
    return sorted((each.start, each.end) for each in works)


def idle_share(spans: Sequence[tuple[float, float]]) -> float:
    """Return the share of the time from the first span to the end of the last that none covers. They are in order."""
    busy, end = 0.0, spans[0][0] if spans else 0.0
    for start, stop in spans:
        busy += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return 1 - busy / (end - spans[0][0]) if busy else 1.0


def prefill(llm: LLM, config: dict[str, Any], length: int, limits: Mapping[str, float]) -> dict[str, Any]:
    """Return the time of a prompt, and the share of the matrix rate that its products take.

    No prompt is longer: a step computes so many tokens.
    """
    found = []
    for run in range(RUNS + 2):
        [prompt] = prompts_of([length - run], config["vocab_size"])
        found.append(timed(llm, [prompt], 1))
    taken = statistics.median(found[2:])
    share = 2 * sizes(config)[1] * length / taken / limits["flops"]
    return {"prompt": length, "ms": taken * 1e3, "of_matrix_rate": share}


def nano_vllm_of(llm: LLM, config: dict[str, Any]) -> dict[str, Any]:
    """Return the time of 256 requests of 100 to 1,024 tokens, in and out (the benchmark of nano-vllm)."""
    chosen = random.Random(0)
    lengths, counts = ([chosen.randint(100, 1024) for _ in range(256)] for _ in range(2))
    taken = timed(llm, prompts_of(lengths, config["vocab_size"]), counts)
    return {"workload": "nano-vllm", "s": taken, "output_tokens_per_s": sum(counts) / taken}


def figures(
    limits: Mapping[str, float],
    device: str = "cuda",
    models: tuple[str, ...] = ("qwen3-0.6b", "qwen3-8b"),
    ways: Sequence[str] = tuple(WAYS),
) -> Iterator[dict[str, Any]]:
    """Yield every figure, those of the usual ways of all models first."""
    for name, way in sorted(product(models, ways), key=lambda each: each[1] not in BOTH):
        config, about = CONFIGS[name], {"model": name, "way": way}
        # large models take long to start: two ways of them say enough
        if (way == "batch invariant" and device == "cpu") or (name != models[0] and way not in BOTH):
            continue
        is_first = way == "as it is"
        has = {"idle": device == "cuda" and is_first, "nano_vllm": name == models[0] and is_first}
        yield from kept(about, partial(of_engine, partial(opened, name, device, WAYS[way]), config, limits, **has))


def of_engine(
    open_engine: Callable[[], AbstractContextManager[LLM]],
    config: dict[str, Any],
    limits: Mapping[str, float],
    *,
    idle: bool,
    nano_vllm: bool,
) -> Iterator[dict[str, Any]]:
    """Yield the figures of one engine, in the order of what they are worth; idle, nano_vllm: whether these too."""
    begun = time.perf_counter()
    with open_engine() as llm:
        yield {"start_s": time.perf_counter() - begun}
        for batch in (1, 64):
            yield decode(llm, config, batch, limits)
        yield prefill(llm, config, 2048, limits)
        for batch in (1, 64) if idle else ():
            # a machine may not allow what counts the GPU's work
            yield from kept({"batch": batch}, lambda batch=batch: [idle_of(llm, config, batch)])
        if nano_vllm:
            yield nano_vllm_of(llm, config)


def main() -> None:
    """Print every figure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--models", nargs="+", default=["qwen3-0.6b", "qwen3-8b"], choices=CONFIGS)
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=WAYS)
    arguments = parser.parse_args()
    limits = {"bytes_per_s": 1e10, "flops": 1e11}
    if arguments.device == "cuda":
        from benchmarks.gpu.parts import ceilings

        limits = ceilings()
    for line in figures(limits, arguments.device, tuple(arguments.models), arguments.ways):
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
