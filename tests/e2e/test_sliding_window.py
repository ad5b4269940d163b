"""Whole models that see a window of tokens: every schedule gives, `==`, what an engine gives that keeps every block.

Blocks that are free, and the null block, are full of NaN from one step to the next: whoever reads one is found out.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo import LLM, SamplingParams
from octavo.core.arithmetic import max_blocks_of_group, num_blocks_for, num_blocks_touched
from octavo.core.outputs import CompletionOutput
from octavo.core.step import ModelRunnerOutput, SchedulerOutput
from tests.conformance.runtimes import LEVELS
from tests.fakes.byte_tokenizer import write_byte_tokenizer
from tests.fakes.checkpoints import make_checkpoint
from tests.fakes.exact_products import need_exact_products
from tests.fakes.families import ALTERNATING
from tests.fakes.whole_engines import core_of, run_together

pytestmark = pytest.mark.skipif(not LEVELS, reason="exact by construction are the compiled kernels, absent here")

VOCABULARY = 300
SHARED = [7 * i % VOCABULARY for i in range(90)]
CHUNK = 16


def requests() -> list[tuple[list[int], SamplingParams]]:
    """Long and short prompts, some of which begin alike, with every way of choosing tokens."""
    ways: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"seed": 1, "n": 2},
        {"seed": 2, "top_p": 0.9},
        {"n": 2, "best_of": 2, "use_beam_search": True},
        {"seed": 3, "best_of": 3, "prompt_logprobs": 0},
        {"temperature": 0.0, "repetition_penalty": 1.2},
    ]
    return [
        (
            SHARED[: (0, 37, 90, 64, 90, 9)[number]] + [(number + 11 * i) % VOCABULARY for i in range(5 + 9 * number)],
            SamplingParams(max_tokens=(60, 33, 40, 25, 18, 70)[number], logprobs=2, ignore_eos=True, **way),
        )
        for number, way in enumerate(ways)
    ]


def load(path: Path, block_size: int, **options: Any) -> LLM:
    common: dict[str, Any] = {
        "model": str(path),
        "dtype": "float32" if block_size < 16 else "bfloat16",
        "block_size": block_size,
        "max_model_len": 256,
        "max_num_batched_tokens": CHUNK,
        "max_num_seqs": 12,
        "swap_space": 0.01,
    }
    return LLM(**common | options)


def spoil_free_blocks(llm: LLM) -> None:
    """From one step to the next nothing can be read in blocks without users and content."""
    executor: Any = core_of(llm).executor
    pools = [cache.pool for cache in core_of(llm).scheduler.block_manager.groups]
    tiers = executor._runner.cache._tiers
    submit = executor.submit

    def submit_and_spoil(step: SchedulerOutput) -> Future[ModelRunnerOutput]:
        future: Future[ModelRunnerOutput] = submit(step)
        for pool, tier in zip(pools, tiers, strict=True):
            spoilt = torch.tensor([0, *pool.empty_blocks()])
            for cache in tier.caches:
                cache.view(torch.uint8)[:, spoilt] = 0xFF
        return future

    executor.submit = submit_and_spoil


ALL, OTHERS = ("mistral", {}), ("qwen3", ALTERNATING)
"""Every layer sees a window, or layers with one alternate with layers that see all, which have blocks of their own."""
SIZES = [(13, 4), (4, 16), (16, 16), (37, 16)]
MORE_SIZES = [(4, 4), (7, 8), (40, 8), (64, 16)]
ALTERNATING_SIZES = [(OTHERS, 7, 4), (OTHERS, 16, 16)]
alternating = pytest.mark.parametrize("windowed", ALTERNATING_SIZES, indirect=True, ids=["7 4", "16 16"])


OPTIONS: dict[str, dict[str, Any]] = {
    "recompute": {"preemption_mode": "recompute", "enable_prefix_caching": False},
    "swap, prefixes, 3 in flight": {"preemption_mode": "swap", "max_steps_in_flight": 3},
    "swap, 2 threads": {
        "preemption_mode": "swap", "enable_prefix_caching": False, "threads": 2, "max_steps_in_flight": 2,
    },
    "prefixes, longer steps": {"preemption_mode": "recompute", "max_num_batched_tokens": 40, "enforce_eager": True},
    "classic": {"enable_chunked_prefill": False, "max_num_batched_tokens": 256, "num_gpu_blocks_override": 160},
}  # fmt: skip


def each_way() -> Iterator[Any]:
    """Every window with every way: with three in turns, with steps in flight where layers differ, the rest long."""
    windows = [*((ALL, *each) for each in SIZES), *ALTERNATING_SIZES, *((ALL, *each) for each in MORE_SIZES)]
    turns = ["swap, prefixes, 3 in flight", "prefixes, longer steps", "classic"]
    for place, window in enumerate(windows):
        for name, options in OPTIONS.items():
            is_quick = name == turns[place % 3] or (window[0] is OTHERS and name == turns[0])
            is_long = window[1:] in MORE_SIZES or not is_quick
            label = f"{window[0][0]} {window[1]} {window[2]}-{name}"
            yield pytest.param(window, options, id=label, marks=[pytest.mark.long] * is_long)


@pytest.fixture(scope="module")
def windowed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A model, its window, a block size, and the answers of an engine that keeps every block, one request at a time."""
    (family, own), window, block_size = request.param
    if block_size < 16:  # the kernels take multiples of 16: plain torch attends
        need_exact_products(torch.float32)
    path = tmp_path_factory.mktemp("windowed")
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 128, "head_dim": 16}
    make_checkpoint(family, path, **{**own, "sliding_window": window, **sizes})
    write_byte_tokenizer(path)
    with load(path, block_size, num_gpu_blocks_override=1024, enable_prefix_caching=False) as llm:
        core_of(llm).scheduler.block_manager.releases_unseen = False
        answers = [llm.generate(prompt, params, use_tqdm=False)[0].outputs for prompt, params in requests()]
        backend = {each[0]: each[1] for each in core_of(llm).executor.call("op_choices")[0]}["attention"]
    assert backend == ("native" if block_size == 16 else "reference")
    return path, window, block_size, answers


@pytest.mark.parametrize(("windowed", "options"), [*each_way()], indirect=["windowed"])
def test_any_schedule_in_the_least_blocks_gives_the_bits_of_all_blocks(windowed: Any, options: dict[str, Any]) -> None:
    path, window, block_size, answers = windowed
    chunk = options.get("max_num_batched_tokens", CHUNK)
    alternates = "layer_types" in json.loads((path / "config.json").read_text())
    least = max(
        max_blocks_of_group(len(prompt), params.max_tokens or 1, params.width, block_size, window - 1 + chunk)
        for prompt, params in requests()
    )
    sizes = {"num_gpu_blocks_override": least, "max_model_len": 256}
    if alternates:  # few blocks for layers that see all are enough for those with a window
        sizes = {"num_gpu_blocks_override": 480 // block_size, "max_model_len": 160}
    with load(path, block_size, **sizes | options) as llm:
        spoil_free_blocks(llm)
        for copies in (1, 2):  # the second time prefixes are in the cache
            assert run_together(llm, requests() * copies) == answers * copies
        stats = core_of(llm).stats()
        if alternates and not options.keys() & {"threads", "num_gpu_blocks_override"}:
            assert stats.num_preemptions > 0
        assert (stats.num_cached_tokens > 0) == options.get("enable_prefix_caching", True)


def test_a_request_of_ten_windows_runs_in_a_pool_of_a_window_and_a_step(tmp_path: Path) -> None:
    make_checkpoint("mistral", tmp_path, sliding_window=16, vocab_size=VOCABULARY)
    write_byte_tokenizer(tmp_path)
    prompt, params = (
        SHARED[:90] + SHARED[:20],
        SamplingParams(max_tokens=50, temperature=0, ignore_eos=True, logprobs=1),
    )
    with load(tmp_path, 16, num_gpu_blocks_override=64) as llm:
        expected = llm.generate(prompt, params, use_tqdm=False)[0].outputs
    with load(tmp_path, 16, num_gpu_blocks_override=3, max_model_len=160) as llm:
        assert "a request keeps at most 31 tokens: a sliding window of 16" in llm.engine.ready.plan
        spoil_free_blocks(llm)
        assert llm.generate(prompt, params, use_tqdm=False)[0].outputs == expected
        assert llm.engine.ready.max_model_len == 160


@alternating
def test_the_windowed_layers_hold_a_window_and_a_step(windowed: Any) -> None:
    path, window, block_size, _ = windowed
    prompt, params = (
        SHARED[:90] + SHARED[:60],
        SamplingParams(max_tokens=50, temperature=0, ignore_eos=True, logprobs=1),
    )
    with load(path, block_size, num_gpu_blocks_override=1024) as llm:
        expected = llm.generate(prompt, params, use_tqdm=False)[0].outputs
    most_live = num_blocks_touched(window - 1 + CHUNK, block_size)
    all_blocks = num_blocks_for(256, block_size)
    with load(path, block_size, num_gpu_blocks_override=all_blocks) as llm:
        assert [group.num_blocks for group in llm.engine.ready.cache.groups] == [most_live, all_blocks]
        core, most_used = core_of(llm), [0, 0]
        llm.engine.add_request("a", prompt, params)
        outputs: list[CompletionOutput] = []
        while llm.engine.has_unfinished_requests():
            for each in llm.engine.step():
                outputs = each.outputs
            used = [cache.pool.num_used_blocks for cache in core.scheduler.block_manager.groups]
            most_used = list(map(max, most_used, used))
        assert outputs == expected
        assert most_used[0] <= most_live
        assert most_used[1] == num_blocks_for(len(prompt) + 49, block_size)
        windowed, full = (group.num_blocks * group.block_bytes for group in llm.engine.ready.cache.groups)
        assert windowed < full / 3


@alternating
def test_memory_of_all_groups_is_given_back_between_requests(windowed: Any) -> None:
    path, _, block_size, answers = windowed
    with load(path, block_size, num_gpu_blocks_override=1024) as llm:
        for number, (prompt, params) in enumerate(requests()[:3]):
            assert llm.generate(prompt, params, use_tqdm=False)[0].outputs == answers[number]
            llm.engine.call("release_memory")
