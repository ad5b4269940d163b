"""Whole models whose layers with a window alternate with layers that see all: the cache groups of every schedule give,
`==`, what an engine gives that keeps every block of every layer, with the window in attention alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from octavo import SamplingParams
from octavo.core.arithmetic import num_blocks_for, num_blocks_touched
from octavo.core.outputs import CompletionOutput
from tests.conformance.runtimes import LEVELS
from tests.e2e.test_sliding_window import CHUNK, SHARED, VOCABULARY, core_of, load, requests, spoil_free_blocks
from tests.fakes.byte_tokenizer import write_byte_tokenizer
from tests.fakes.checkpoints import make_checkpoint
from tests.fakes.exact_products import need_exact_products
from tests.fakes.families import ALTERNATING

pytestmark = pytest.mark.skipif(not LEVELS, reason="exact by construction are the compiled kernels, absent here")


@pytest.fixture(scope="module", params=[(7, 4), (16, 16)])
def alternating(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A model, its window, a block size, and the answers of an engine that keeps every block, one request at a time."""
    window, block_size = request.param
    if block_size < 16:  # the kernels take multiples of 16: plain torch attends
        need_exact_products(torch.float32)
    path = tmp_path_factory.mktemp("alternating")
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 128, "head_dim": 16}
    make_checkpoint("qwen3", path, **{**ALTERNATING, "sliding_window": window, **sizes})
    write_byte_tokenizer(path)
    with load(path, block_size, num_gpu_blocks_override=1024, enable_prefix_caching=False) as llm:
        core_of(llm).scheduler.block_manager.releases_unseen = False
        answers = [llm.generate(prompt, params, use_tqdm=False)[0].outputs for prompt, params in requests()]
    return path, window, block_size, answers


@pytest.mark.parametrize(
    ("options", "preempts"),
    [
        ({"preemption_mode": "recompute", "enable_prefix_caching": False}, True),
        ({"preemption_mode": "swap", "max_steps_in_flight": 3}, True),
        ({"num_gpu_blocks_override": 1024, "max_steps_in_flight": 2}, False),
        ({"preemption_mode": "recompute", "max_num_batched_tokens": 40, "enforce_eager": True}, True),
    ],
    ids=["recompute", "swap, prefixes, 3 in flight", "room for all", "prefixes, longer steps"],
)
def test_any_schedule_gives_the_bits_of_an_engine_that_keeps_all(
    alternating: Any, options: dict[str, Any], preempts: bool
) -> None:
    path, _, block_size, answers = alternating
    common = {"num_gpu_blocks_override": 480 // block_size, "max_model_len": 160}
    with load(path, block_size, **common | options) as llm:
        spoil_free_blocks(llm)
        assert [group.window is None for group in llm.engine.ready.cache.groups] == [False, True]
        # each twice, so that the second one finds prefixes in the cache
        found: dict[str, list[CompletionOutput]] = {}
        for copy in "ab":
            for number, (prompt, params) in enumerate(requests()):
                llm.engine.add_request(f"{number}{copy}", prompt, params)
        while llm.engine.has_unfinished_requests():
            found.update({each.request_id: each.outputs for each in llm.engine.step()})
        core_of(llm).scheduler.check()
        for request_id, outputs in found.items():
            assert outputs == answers[int(request_id[:-1])], request_id
        assert len(found) == 2 * len(answers)
        stats = core_of(llm).stats()
        assert (stats.num_preemptions > 0) == preempts
        assert (stats.num_cached_tokens > 0) == options.get("enable_prefix_caching", True)


def test_the_windowed_layers_hold_a_window_and_a_step(alternating: Any) -> None:
    path, window, block_size, _ = alternating
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


def test_memory_of_all_groups_is_given_back_between_requests(alternating: Any) -> None:
    path, _, block_size, answers = alternating
    with load(path, block_size, num_gpu_blocks_override=1024) as llm:
        for number, (prompt, params) in enumerate(requests()[:3]):
            assert llm.generate(prompt, params, use_tqdm=False)[0].outputs == answers[number]
            llm.engine.call("release_memory")
