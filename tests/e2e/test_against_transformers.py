"""The whole engine agrees with transformers: batched, in pieces, after prefix hits, and through preemption.

Log-probabilities are within 1e-4 of the oracle's, and every greedy token is the oracle's but for ties closer than that.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo import LLM, SamplingParams
from octavo.core.outputs import Logprob, RequestOutput
from tests.fakes.byte_tokenizer import write_byte_tokenizer
from tests.fakes.checkpoints import FAMILIES, load_oracle, make_checkpoint

TOLERANCE = 1e-4
GREEDY = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True, logprobs=0, prompt_logprobs=0)


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp(request.param)
    make_checkpoint(request.param, path, vocab_size=300)
    return write_byte_tokenizer(path)


@pytest.fixture(scope="module")
def oracle(checkpoint: Path) -> Any:
    return load_oracle(checkpoint)


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


def assert_agrees(oracle: Any, output: RequestOutput) -> None:
    assert output.error is None
    prompt, answer = output.prompt_token_ids, output.outputs[0].token_ids
    assert len(answer) == GREEDY.max_tokens
    with torch.inference_mode():
        logits = oracle(torch.tensor([prompt + answer])).logits[0].double()
    logprobs = torch.log_softmax(logits, dim=-1)
    described: list[dict[int, Logprob]] = [d for d in output.prompt_logprobs or [] if d is not None]
    described += output.outputs[0].logprobs or []
    tokens = (prompt + answer)[1:]
    assert len(described) == len(tokens)
    for position, (token, found) in enumerate(zip(tokens, described, strict=True)):
        assert found[token].logprob == pytest.approx(float(logprobs[position, token]), abs=TOLERANCE)
    for position, token in enumerate(answer, start=len(prompt) - 1):
        assert float(logits[position, token]) >= float(logits[position].max()) - TOLERANCE


def test_alone_and_in_a_batch(checkpoint: Path, oracle: Any, prompts: list[list[int]]) -> None:
    with load(checkpoint) as llm:
        for output in llm.generate(prompts, GREEDY):
            assert_agrees(oracle, output)
        assert_agrees(oracle, llm.generate(prompts[4], GREEDY)[0])


def test_prompts_in_pieces_beside_running_sequences(checkpoint: Path, oracle: Any, prompts: list[list[int]]) -> None:
    with load(checkpoint, max_num_batched_tokens=8, max_num_seqs=4) as llm:
        for output in llm.generate(prompts, GREEDY):
            assert_agrees(oracle, output)


def test_after_prefix_hits(checkpoint: Path, oracle: Any, prompts: list[list[int]]) -> None:
    without_prompt = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True, logprobs=0)
    with load(checkpoint) as llm:
        first = llm.generate(prompts, GREEDY)
        again = llm.generate(prompts, without_prompt)
        assert sum(output.num_cached_tokens for output in again) > 60
        for cold, warm in zip(first, again, strict=True):
            assert warm.outputs[0].token_ids == cold.outputs[0].token_ids
            warm.prompt_logprobs = cold.prompt_logprobs
            assert_agrees(oracle, warm)


@pytest.mark.parametrize("enable_prefix_caching", [True, False])
def test_through_preemption(
    checkpoint: Path, oracle: Any, prompts: list[list[int]], enable_prefix_caching: bool
) -> None:
    with load(
        checkpoint, num_gpu_blocks_override=40, max_num_batched_tokens=16, max_num_seqs=8, max_model_len=128,
        enable_prefix_caching=enable_prefix_caching,
    ) as llm:  # fmt: skip
        outputs = llm.generate(prompts, GREEDY)
        assert llm.engine.stats.num_preemptions > 0
        for output in outputs:
            assert_agrees(oracle, output)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama-alone")
    make_checkpoint("llama", path, vocab_size=300)
    return write_byte_tokenizer(path)


def test_seeded_requests_draw_the_same_alone_and_in_any_batch(llama: Path, prompts: list[list[int]]) -> None:
    params = [
        SamplingParams(n=1 + i % 3, seed=i, temperature=0.7 + 0.2 * (i % 3), top_p=0.9, top_k=50, max_tokens=20)
        for i in range(len(prompts))
    ]
    with (
        load(llama) as roomy,
        load(llama, num_gpu_blocks_override=36, max_num_seqs=5, max_num_batched_tokens=8) as tight,
    ):
        alone = [roomy.generate(prompt, one)[0] for prompt, one in zip(prompts, params, strict=True)]
        together = roomy.generate(prompts, params)
        pressed = tight.generate(prompts, params)
        assert tight.engine.stats.num_preemptions > 0
    for one, two, three in zip(alone, together, pressed, strict=True):
        expected = [completion.token_ids for completion in one.outputs]
        assert [completion.token_ids for completion in two.outputs] == expected
        assert [completion.token_ids for completion in three.outputs] == expected
        assert [completion.index for completion in three.outputs] == list(range(len(expected)))


def test_bfloat16_draws_the_same_alone_and_in_a_batch(llama: Path, prompts: list[list[int]]) -> None:
    params = [
        SamplingParams(seed=i, temperature=1.0, max_tokens=40, ignore_eos=True, logprobs=0) for i in range(len(prompts))
    ]
    with load(llama, dtype="bfloat16", enable_prefix_caching=False) as llm:
        alone = [llm.generate(prompt, one)[0].outputs[0] for prompt, one in zip(prompts, params, strict=True)]
        together = [output.outputs[0] for output in llm.generate(prompts, params)]
    assert [one.token_ids for one in together] == [one.token_ids for one in alone]
