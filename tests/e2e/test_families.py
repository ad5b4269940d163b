"""Every family gives a request the bits of a lonely run, `==`: in a batch, cut, behind prefix hits, forked, as beams,
swapped, and preempted in a tiny pool; blocks that are free are full of NaN.

A family of `tests/fakes/families.py` is here by itself; `QUICK` and `OWN` are the lines that it may add.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from octavo import LLM, SamplingParams
from tests.conformance.runtimes import LEVELS
from tests.e2e.test_sliding_window import core_of, spoil_free_blocks
from tests.fakes.byte_tokenizer import write_byte_tokenizer
from tests.fakes.checkpoints import make_checkpoint
from tests.fakes.families import FAMILIES
from tests.fakes.running_sum import RUNNING_SUM, make_running_sum
from tests.fakes.whole_engines import run_together

pytestmark = pytest.mark.skipif(not LEVELS, reason="exact by construction are the compiled kernels, absent here")

QUICK = {
    RUNNING_SUM,
    "deepseek_v4",
    "gemma3",
    "glm_moe_dsa",
    "mistral_large4",
    "qwen3_5",
    "youtu",
}
"""Families that are run each time: one of each kind of layer. The others are run with the long tests."""

OWN: dict[str, dict[str, Any]] = {
    "ernie4_5_vl_moe": {
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [2, 2, 4]}
    },
    "gemma3": {"sliding_window": 20},
    "gemma4": {"sliding_window": 20, "head_dim": 8},
    "gemma4_moe": {"sliding_window": 20, "head_dim": 8},
    "glm_moe_dsa": {"indexer_types": ["full", "shared", "full"]},
    "mamba2": {"num_heads": 8},
    "mistral": {"sliding_window": 60},
}
"""Sizes of a family here, where those of `make_checkpoint` do not do."""

SCARCE = dict.fromkeys(("falcon_mamba", "mamba", "mamba2"), 7)
"""Blocks of a pool that is too small for all requests, where 11 are enough for them: a sequence has few states."""
VOCABULARY = 300
BLOCK = 16
SHARED = [7 * i % VOCABULARY for i in range(40)]
HARSH: dict[str, dict[str, Any]] = {
    "cut, swapped, 3 in flight": {"preemption_mode": "swap", "max_num_batched_tokens": 12, "max_steps_in_flight": 3},
    "recomputed, 3 in flight": {"preemption_mode": "recompute", "max_steps_in_flight": 3, "state_snapshot_tokens": 0},
}


def requests() -> list[tuple[list[int], SamplingParams]]:
    """Prompts that begin alike, among them one that ends with a block and one that is contained in another."""
    ways: list[tuple[int, int, int, dict[str, Any]]] = [
        (40, 13, 21, {"temperature": 0.0}),
        (40, 8, 14, {"seed": 1, "n": 2}),
        (40, 24, 9, {"seed": 2, "top_p": 0.9}),
        (32, 0, 18, {"n": 2, "best_of": 2, "use_beam_search": True}),
        (0, 3, 30, {"temperature": 0.0, "repetition_penalty": 1.2}),
    ]
    return [
        (
            SHARED[:shared] + [(number + 11 * i) % VOCABULARY for i in range(own)],
            SamplingParams(max_tokens=max_tokens, logprobs=1, ignore_eos=True, **way),
        )
        for number, (shared, own, max_tokens, way) in enumerate(ways)
    ]


@contextmanager
def opened(path: Path, **options: Any) -> Iterator[LLM]:
    common: dict[str, Any] = {"dtype": "bfloat16", "block_size": BLOCK, "max_model_len": 96, "max_num_seqs": 12}
    with LLM(str(path), **common | options) as llm:
        spoil_free_blocks(llm)
        yield llm


def make(family: str, path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write a checkpoint of the family with the sizes of heads that kernels take."""
    sizes: dict[str, Any] = {"vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 128}
    if family == RUNNING_SUM:
        return write_byte_tokenizer(make_running_sum(path, monkeypatch, **sizes))
    sizes |= {"head_dim": 16} if "head_dim" in FAMILIES[family][2] else {}
    make_checkpoint(family, path, **{**sizes, **OWN.get(family, {})})
    return write_byte_tokenizer(path)


def check_schedules(path: Path, requests: list[tuple[Any, SamplingParams]], num_blocks: int) -> list[Any]:
    """Compare what requests give together, cut and preempted, with what each gives by itself, and return that."""
    with opened(path, num_gpu_blocks_override=100, enable_prefix_caching=False) as llm:
        expected = [llm.generate(prompt, params, use_tqdm=False)[0].outputs for prompt, params in requests]
    num_preemptions = 0
    for way, options in HARSH.items():
        with opened(path, **{"num_gpu_blocks_override": num_blocks, "swap_space": 0.01} | options) as llm:
            for _ in range(2):  # the second time prefixes are in the cache
                assert run_together(llm, requests) == expected, way
            stats = core_of(llm).stats()
            num_preemptions += stats.num_preemptions
            assert stats.num_cached_tokens > 0, way
    assert num_preemptions > 0
    return expected


@pytest.mark.parametrize(
    "family",
    [each if each in QUICK else pytest.param(each, marks=pytest.mark.long) for each in (*FAMILIES, RUNNING_SUM)],
)
def test_any_schedule_gives_the_bits_of_a_lonely_run(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_schedules(make(family, tmp_path, monkeypatch), requests(), SCARCE.get(family, 11))
