"""The whole engine agrees with transformers: batched, in pieces, after prefix hits, and through preemption.

Log-probabilities are within 1e-4 of the oracle's, and every greedy token is the oracle's but for ties closer than that.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from octavo import LLM, SamplingParams
from octavo.core.outputs import Logprob, RequestOutput
from tests.fakes.byte_tokenizer import write_byte_tokenizer
from tests.fakes.checkpoints import load_oracle, make_checkpoint
from tests.fakes.exact_products import need_exact_products

FAMILIES = ("gemma3", "gpt2", "llama", "mistral")
"""Windows in no layer, in some and in all; learned positions and rotations. Other families are in tests/models."""
TOLERANCE = 1e-4
GREEDY = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, logprobs=0, prompt_logprobs=0)


@pytest.fixture(scope="module", params=FAMILIES)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp(request.param)
    make_checkpoint(request.param, path, vocab_size=300)
    return write_byte_tokenizer(path)


Oracle = Callable[..., torch.Tensor]
"""The logits [tokens, vocabulary] of so many tokens, which are the same ones in every schedule."""


@pytest.fixture(scope="module")
def oracle(checkpoint: Path) -> Oracle:
    model = load_oracle(checkpoint)

    @cache
    def logits(*tokens: int) -> torch.Tensor:
        with torch.inference_mode():
            found: torch.Tensor = model(torch.tensor([tokens])).logits[0].double()
        return found

    return logits


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """Short and long ones, one of a single token, some with a long common beginning."""
    source = random.Random(0)

    def tokens(count: int) -> list[int]:
        return [source.randrange(300) for _ in range(count)]

    common = tokens(21)
    return [tokens(1), tokens(5), common + tokens(3), common + tokens(9), tokens(40), common + tokens(3), common]


def load(checkpoint: Path, **keywords: Any) -> LLM:
    return LLM(model=str(checkpoint), **({"block_size": 4, "num_gpu_blocks_override": 400, "threads": 1} | keywords))


def assert_agrees(oracle: Oracle, output: RequestOutput) -> None:
    assert output.error is None
    prompt, answer = output.prompt_token_ids, output.outputs[0].token_ids
    assert len(answer) == GREEDY.max_tokens
    logits = oracle(*prompt, *answer)
    logprobs = torch.log_softmax(logits, dim=-1)
    described: list[dict[int, Logprob]] = [d for d in output.prompt_logprobs or [] if d is not None]
    described += output.outputs[0].logprobs or []
    tokens = (prompt + answer)[1:]
    assert len(described) == len(tokens)
    for position, (token, found) in enumerate(zip(tokens, described, strict=True)):
        assert found[token].logprob == pytest.approx(float(logprobs[position, token]), abs=TOLERANCE)
    for position, token in enumerate(answer, start=len(prompt) - 1):
        assert float(logits[position, token]) >= float(logits[position].max()) - TOLERANCE


def test_after_prefix_hits(checkpoint: Path, oracle: Oracle, prompts: list[list[int]]) -> None:
    with load(checkpoint) as llm:
        first = llm.generate(prompts, GREEDY)
        again = llm.generate(prompts, replace(GREEDY, prompt_logprobs=None))
        assert sum(output.num_cached_tokens for output in again) > 60
        for cold, warm in zip(first, again, strict=True):
            assert warm.outputs[0].token_ids == cold.outputs[0].token_ids
            warm.prompt_logprobs = cold.prompt_logprobs
            assert_agrees(oracle, warm)


SMALL: dict[str, Any] = {
    "num_gpu_blocks_override": 34,
    "max_num_batched_tokens": 16,
    "max_num_seqs": 8,
    "max_model_len": 128,
}


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, marks=pytest.mark.long),  # as above, without hits
        {"max_num_batched_tokens": 8, "max_num_seqs": 4},
        SMALL,
        pytest.param({**SMALL, "enable_prefix_caching": False}, marks=pytest.mark.long),
    ],
    ids=["batch", "pieces", "preemption", "preemption without a prefix cache"],
)
def test_all_schedules_agree(
    checkpoint: Path, oracle: Oracle, prompts: list[list[int]], options: dict[str, Any]
) -> None:
    with load(checkpoint, **options) as llm:
        outputs = llm.generate(prompts, GREEDY)
        if "max_model_len" in options:
            # a window holds so little that nobody gives way here (tests/e2e/test_sliding_window.py has that)
            assert (llm.engine.stats.num_preemptions > 0) == (llm.engine.ready.cache.window is None)
        for output in (*outputs, *llm.generate(prompts[4], GREEDY)):
            assert_agrees(oracle, output)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama-alone")
    make_checkpoint("llama", path, vocab_size=300)
    return write_byte_tokenizer(path)


def test_memory_that_was_given_back_changes_no_bit(llama: Path, prompts: list[list[int]]) -> None:
    params = SamplingParams(temperature=1, seed=7, max_tokens=32, ignore_eos=True, logprobs=0)
    with load(llama, num_gpu_blocks_override=40_000) as llm:
        first = llm.generate(prompts, params)
        llm.engine.call("release_memory")
        cached = llm.generate(prompts, params)
        assert sum(output.num_cached_tokens for output in cached) > 60
        assert llm.reset_prefix_cache()
        llm.engine.call("release_memory")
        fresh = llm.generate(prompts, params)
    for output, *others in zip(first, cached, fresh, strict=True):
        assert all(other.outputs[0].logprobs == output.outputs[0].logprobs for other in others)
        assert all(other.outputs[0].token_ids == output.outputs[0].token_ids for other in others)


EXACT_RUNS: dict[str, dict[str, Any]] = {
    "in a batch": {},
    "in pieces": {"max_num_batched_tokens": 8, "max_num_seqs": 5},
    "after prefix hits": {"enable_prefix_caching": True},
    "through preemption": {"num_gpu_blocks_override": 36, "max_num_batched_tokens": 16, "max_num_seqs": 8},
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_seeded_requests_have_the_same_tokens_and_the_same_bits_alone_and_in_any_schedule(
    llama: Path, prompts: list[list[int]], dtype: str
) -> None:
    if dtype == "bfloat16":
        need_exact_products(torch.bfloat16)  # in float32 tokens are the same even where bits are not
    params = [
        SamplingParams(
            n=1 + i % 3, seed=i, temperature=0.7 + 0.2 * (i % 3), top_p=0.9, top_k=50, max_tokens=30, logprobs=3
        )
        for i in range(len(prompts))
    ]
    with load(llama, dtype=dtype, enable_prefix_caching=False) as llm:
        alone = [llm.generate(prompt, one)[0].outputs for prompt, one in zip(prompts, params, strict=True)]
    assert [[completion.index for completion in outputs] for outputs in alone] == [[*range(p.n)] for p in params]
    runs = {}
    for name, keywords in EXACT_RUNS.items():
        with load(llama, dtype=dtype, **({"enable_prefix_caching": False} | keywords)) as llm:
            for _ in range(2 if name == "after prefix hits" else 1):
                results = llm.generate(prompts, params)
            assert (llm.engine.stats.num_preemptions > 0) == (name == "through preemption")
            assert any(result.num_cached_tokens for result in results) == (name == "after prefix hits")
        found = [result.outputs for result in results]
        assert [[one.token_ids for one in outputs] for outputs in found] == [
            [one.token_ids for one in outputs] for outputs in alone
        ], name
        runs[name] = found
    need_exact_products(torch.float32)
    for name, found in runs.items():
        assert found == alone, name  # ids, text, every log-probability, finish reasons
