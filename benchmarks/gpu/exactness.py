"""Engines on a GPU whose answers must be the same bits, whatever runs beside and however steps are cut."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any, Final

from benchmarks.gpu.kept import failure_of
from octavo import LLM, SamplingParams

BASE: Final[dict[str, Any]] = {
    "device": "cuda",
    "dtype": "bfloat16",
    "batch_invariant": True,
    "max_num_seqs": 32,
    "kv_cache_memory": "64MiB",
    "swap_space": 0.0625,
}
WAYS: Final[dict[str, dict[str, Any]]] = {
    "as it is": {},
    "launched by the host": {"enforce_eager": True},
    "one step at a time": {"max_steps_in_flight": 1},
    "four steps in flight": {"max_steps_in_flight": 4},
    "chunks of 24 tokens": {"max_num_batched_tokens": 24, "max_num_seqs": 8},
    "few blocks, recomputed": {"num_gpu_blocks_override": 40, "preemption_mode": "recompute"},
    "few blocks, swapped": {"num_gpu_blocks_override": 40, "preemption_mode": "swap"},
    "blocks of 32": {"block_size": 32},
    "guesses of n-grams": {"speculative_config": {"method": "ngram", "num_speculative_tokens": 4}},
    "guesses of a draft model": {
        "speculative_config": {"method": "draft_model", "model": "octavo-tiny", "num_speculative_tokens": 3}
    },
}
"""Each must give the answers of the first."""
OTHERS: Final[dict[str, dict[str, Any]]] = {
    "fastest": {"batch_invariant": False},
    "int4": {"quantization": "int4"},
    "int8": {"quantization": "int8"},
    "keys of int8": {"kv_cache_dtype": "int8"},
    "keys of fp8": {"kv_cache_dtype": "fp8"},
    "float16": {"dtype": "float16"},
    "float32": {"dtype": "float32"},
}
"""Each has answers of its own."""
TEXTS: Final = (
    "Once upon a time",
    "The little dog and the little cat went to the park. The little dog and the little cat",
    "One day, a girl named Lily found a big red ball. " * 6,
    "Tom",
)


def asked() -> tuple[list[Any], list[SamplingParams]]:
    """Return prompts, and what is asked of each: every kind of draw."""
    kinds: Sequence[dict[str, Any]] = (
        {"temperature": 0.0},
        {"temperature": 0.8},
        {"temperature": 1.0, "top_k": 40, "top_p": 0.9},
        {"temperature": 1.0, "logprobs": 3},
        {"temperature": 1.0, "repetition_penalty": 1.2, "min_p": 0.02},
    )
    pairs = [(text, kind) for kind in kinds for text in TEXTS]
    params = [SamplingParams(max_tokens=48, seed=seed, ignore_eos=True, **kind) for seed, (_, kind) in enumerate(pairs)]
    return [text for text, _ in pairs], params


def answers(llm: LLM, prompts: list[Any], params: list[SamplingParams]) -> list[Any]:
    """Return tokens and log-probabilities of each answer."""
    return [
        (each.outputs[0].token_ids, each.outputs[0].logprobs) for each in llm.generate(prompts, params, use_tqdm=False)
    ]


def share(found: Sequence[Any], expected: Sequence[Any]) -> float:
    """Return the share of equal answers."""
    return sum(one == other for one, other in zip(found, expected, strict=True)) / len(expected)


def exactness(ways: dict[str, dict[str, Any]], *, is_one: bool) -> Iterator[dict[str, Any]]:
    """Yield for each way the shares of answers that are those alone, those again with a warm prefix cache, and, where
    all ways must agree (`is_one`), those of the first."""
    prompts, params = asked()
    first: list[Any] | None = None
    for way, options in ways.items():
        line: dict[str, Any] = {"exactness": way}
        begun = time.monotonic()
        try:
            with LLM("octavo-tiny", **{**BASE, **options}) as llm:
                line["start_s"] = round(time.monotonic() - begun, 2)
                together = answers(llm, prompts, params)
                line["again"] = share(answers(llm, prompts, params), together)
                some = range(0, len(prompts), 1 if first is None else 3)
                alone = [answers(llm, [prompts[i]], [params[i]])[0] for i in some]
                line["alone"] = share(alone, [together[i] for i in some])
            first = first or together
            line |= {"as_the_first": share(together, first)} if is_one else {}
        except Exception as error:  # the other ways are still of use
            line["failed"] = failure_of(error)
        yield {**line, "s": round(time.monotonic() - begun, 1)}
