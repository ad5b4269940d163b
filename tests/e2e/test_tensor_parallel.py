"""Ranks that share every layer give the bits of one rank: tokens, log-probabilities, texts, errors, all `==`."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from octavo import LLM, SamplingParams
from octavo.distributed.mesh import Mesh
from tests.conformance.runtimes import LEVELS
from tests.distributed.threads import memory_meshes, thread_meshes
from tests.fakes.byte_tokenizer import write_byte_tokenizer
from tests.fakes.checkpoints import make_checkpoint
from tests.fakes.families import ALTERNATING
from tests.fakes.rank_threads import llm_of_ranks

pytestmark = pytest.mark.skipif(not LEVELS, reason="exact by construction are the compiled kernels, absent here")

VOCABULARY = 301
"""Divides by no number of ranks."""

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "mistral": ("mistral", {}),
    "qwen2": ("qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", ALTERNATING),
    "gpt2": ("gpt2", {}),
    "opt": ("opt", {}),
}
EVERY_FORMAT = "llama"
"""The family in every format, as qwen3 with recorded steps; of the others, whose layers
tests/models/test_tensor_parallel.py compares, each has one."""
FORMATS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16", "kv_cache_dtype": "int8"},
    "int8": {"dtype": "bfloat16", "quantization": "int8"},
    "int4": {"dtype": "float32", "quantization": "int4"},
}
PREFIX = [7 * i % VOCABULARY for i in range(34)]
REQUESTS: list[tuple[list[int], SamplingParams]] = [
    (PREFIX[:5], SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)),
    (PREFIX, SamplingParams(temperature=0.0, logprobs=3, repetition_penalty=1.3, max_tokens=12)),
    (PREFIX, SamplingParams(seed=1, top_p=0.9, top_k=40, max_tokens=12, ignore_eos=True)),
    (PREFIX[:20], SamplingParams(seed=1, top_k=3, n=3, max_tokens=12, min_p=0.02, stop=("a", "e", "i"))),
    (PREFIX[:9], SamplingParams(seed=2, logprobs=2, frequency_penalty=1.0, min_tokens=8, max_tokens=12)),
    (PREFIX[:7], SamplingParams(seed=3, logprob_token_ids=(9, 2), frequency_penalty=1.0, max_tokens=5)),
    (PREFIX[9:], SamplingParams(seed=3, bad_words=("a", "b"), logit_bias={100: 3.0}, prompt_logprobs=2, max_tokens=8)),
    (PREFIX[3:], SamplingParams(n=2, best_of=2, use_beam_search=True, logprobs=2, max_tokens=8)),
    (PREFIX[5:9], SamplingParams(seed=4, n=1, best_of=3, max_tokens=8)),
    ([111], SamplingParams(max_tokens=6, seed=1, allowed_token_ids=[97], bad_words=["aa"], ignore_eos=True)),
    (PREFIX[:30], SamplingParams(seed=5, max_tokens=12, ignore_eos=True)),
]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    paths = {}
    for name, (family, overrides) in FAMILIES.items():
        path = tmp_path_factory.mktemp(name)
        make_checkpoint(family, path, vocab_size=VOCABULARY, **overrides)
        paths[name] = write_byte_tokenizer(path)
    return paths


def engine(path: Path, size: int, **keywords: Any) -> AbstractContextManager[LLM]:
    """An engine of `size` tensor ranks in threads, or of one rank as always."""
    sizes = {"max_model_len": 128, "num_gpu_blocks_override": 200, "threads": 1, "block_size": 16}
    return llm_of_ranks(path, size, **(sizes | keywords)) if size > 1 else LLM(model=str(path), **(sizes | keywords))


def answers(llm: LLM, times: int = 1) -> list[Any]:
    """What all requests give in one batch; those of several times come later, when their prefixes are cached."""
    prompts, params = zip(*REQUESTS, strict=True)
    found = []
    for _ in range(times):
        outputs = llm.generate(list(prompts), list(params), use_tqdm=False)
        found.append([(each.outputs, each.prompt_logprobs, each.error) for each in outputs])
    return found


@pytest.fixture(scope="module")
def of_one_rank(checkpoints: dict[str, Path]) -> Callable[..., list[Any]]:
    """What one rank answers the first and the second time, for a family and arguments."""
    known: dict[str, list[Any]] = {}

    def run(family: str, **keywords: Any) -> list[Any]:
        key = f"{family} {keywords}"
        if key not in known:
            with engine(checkpoints[family], 1, **keywords) as llm:
                known[key] = answers(llm, 2)
        return known[key]

    return run


@pytest.mark.parametrize(
    ("family", "form"),
    [
        (family, form)
        for place, family in enumerate(FAMILIES)
        for number, form in enumerate(FORMATS)
        if family == EVERY_FORMAT or number == place % len(FORMATS)
    ],
)
def test_every_model_gives_the_bits_of_one_rank(
    family: str, form: str, checkpoints: dict[str, Path], of_one_rank: Callable[..., list[Any]]
) -> None:
    expected = of_one_rank(family, **FORMATS[form])
    size = 4 if form in ("bfloat16", "int8") else 2
    with engine(checkpoints[family], size, **FORMATS[form]) as llm:
        assert answers(llm, 2) == expected


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"num_gpu_blocks_override": 14, "preemption_mode": "recompute"}, marks=pytest.mark.long),
        {"num_gpu_blocks_override": 14, "preemption_mode": "swap", "swap_space": 0.01},
        {"max_steps_in_flight": 3, "max_num_batched_tokens": 16, "max_num_seqs": 6},
        pytest.param({"enforce_eager": True, "max_steps_in_flight": 1}, marks=pytest.mark.long),
    ],
    ids=lambda options: " ".join(map(str, options.values())),
)
def test_any_schedule_gives_the_bits_of_one_rank(
    options: dict[str, Any], checkpoints: dict[str, Path], of_one_rank: Callable[..., list[Any]]
) -> None:
    expected = of_one_rank("qwen3", dtype="bfloat16")
    with engine(checkpoints["qwen3"], 2, dtype="bfloat16", **options) as llm:
        assert answers(llm, 2) == expected


@pytest.mark.parametrize(("form", "size"), [*zip(FORMATS, (4, 2, 4, 2), strict=True), ("int4", 4)])
def test_recorded_steps_of_ranks_that_share_memory_give_the_bits_of_one_rank(
    form: str,
    size: int,
    checkpoints: dict[str, Path],
    of_one_rank: Callable[..., list[Any]],
    caplog: pytest.LogCaptureFixture,
) -> None:
    expected = of_one_rank("qwen3", **FORMATS[form])
    with (
        caplog.at_level(logging.INFO, "octavo"),
        engine(checkpoints["qwen3"], size, open_meshes=memory_meshes, **FORMATS[form]) as llm,
    ):
        assert answers(llm, 2) == expected
    assert not [line for line in caplog.messages if "record" in line]


@pytest.mark.parametrize(("family", "sizes"), [("gpt2", (2, 1)), ("qwen3", (2, 2))])
def test_random_weights_are_those_of_one_rank(
    family: str, sizes: tuple[int, int], checkpoints: dict[str, Path], caplog: pytest.LogCaptureFixture
) -> None:
    with engine(checkpoints[family], 1, load_format="dummy") as llm:
        expected = answers(llm)
    with (
        caplog.at_level(logging.INFO, "octavo"),
        llm_of_ranks(checkpoints[family], *sizes, load_format="dummy", max_model_len=128, block_size=16) as llm,
    ):
        assert answers(llm) == expected
    (line,) = {line for line in caplog.messages if "record" in line}
    assert line == "ranks that share a layer are on several machines: steps run without recordings, more slowly"


def test_partial_sums_give_the_same_bits_each_time(checkpoints: dict[str, Path]) -> None:
    def meshes_that(reduce: Any) -> Callable[[int, int], list[Mesh]]:
        return lambda *sizes: [replace(mesh, reduce=reduce) for mesh in thread_meshes(*sizes)]

    request = PREFIX, SamplingParams(temperature=0.0, logprobs=2, max_tokens=12, ignore_eos=True)
    found = []
    for way in ("gather", "sum", "sum"):
        with engine(checkpoints["llama"], 2, dtype="float32", open_meshes=meshes_that(way)) as llm:
            found.append(llm.generate(*request, use_tqdm=False)[0].outputs[0])
    assert found[1] == found[2]
    assert found[1].cumulative_logprob == pytest.approx(found[0].cumulative_logprob, rel=1e-4)
