"""`logprobs_mode="processed_logprobs"`: the same tokens, described by the distributions that they were drawn from."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest

from octavo import LLM, SamplingParams
from octavo.core.outputs import CompletionOutput
from octavo.core.structured_outputs import StructuredOutputsParams

PROMPTS = ["Once upon a time", "The big red", "A", "The fox"]
PARAMS = [
    SamplingParams(seed=1, temperature=0.7, top_k=5, logprobs=5, max_tokens=8),
    SamplingParams(temperature=0.0, logprobs=1, prompt_logprobs=1, max_tokens=8),
    SamplingParams(seed=2, temperature=1.2, top_p=0.8, frequency_penalty=0.5, n=2, logprobs=2, max_tokens=8),
    SamplingParams(
        temperature=0.0, logprobs=3, max_tokens=8, structured_outputs=StructuredOutputsParams(choice=("yes", "no"))
    ),
]
SIZES: dict[str, Any] = {"max_model_len": 64, "num_gpu_blocks_override": 64, "threads": 1}
DRAFTS = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}


def outputs(llm: LLM, prompts: Any = PROMPTS, params: Any = PARAMS) -> list[list[CompletionOutput]]:
    found = llm.generate(prompts, params, use_tqdm=False)
    assert not any(each.error for each in found), found
    return [each.outputs for each in found]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("octavo-tiny", logprobs_mode="processed_logprobs", **SIZES) as llm:
        yield llm


def test_tokens_stay_and_their_log_probabilities_are_of_what_may_be_drawn(llm: LLM) -> None:
    found = outputs(llm)
    with LLM("octavo-tiny", **SIZES) as plain:
        raw = outputs(plain)
    assert [[each.token_ids for each in one] for one in found] == [[each.token_ids for each in one] for one in raw]
    (cut,), (greedy,), _, (formed,) = found
    for position in cut.logprobs or []:
        assert sum(math.exp(each.logprob) for each in position.values()) == pytest.approx(1, abs=1e-5)
    # nothing acts on a greedy row
    expected = [[each.logprob for each in position.values()] for position in raw[1][0].logprobs or []]
    assert len(greedy.logprobs or []) == len(expected)
    for position, logprobs in zip(greedy.logprobs or [], expected, strict=True):
        assert [each.logprob for each in position.values()] == pytest.approx(logprobs, abs=1e-5)
    first = (formed.logprobs or [])[0]
    assert all(math.isfinite(each.logprob) for each in first.values()), "what a form bars is left out"
    assert sum(math.exp(each.logprob) for each in first.values()) <= 1 + 1e-5


def test_company_drafts_and_ranks_change_no_bit(llm: LLM) -> None:
    together = outputs(llm)
    assert [outputs(llm, prompt, params)[0] for prompt, params in zip(PROMPTS, PARAMS, strict=True)] == together
    more: dict[str, Any]
    for more in ({"speculative_config": DRAFTS}, {"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}):
        with LLM("octavo-tiny", logprobs_mode="processed_logprobs", **SIZES | more) as other:
            assert outputs(other) == together


def test_named_tokens_are_refused(llm: LLM) -> None:
    [output] = llm.generate(PROMPTS[0], SamplingParams(logprob_token_ids=(5,)), use_tqdm=False)
    assert output.error is not None
    assert output.error.field == "logprob_token_ids"
    assert "logprobs_mode = processed_logprobs" in output.error.message
