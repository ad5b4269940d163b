"""Log-probabilities of tokens that a request names are those that it gets of the whole vocabulary, all `==`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from octavo import LLM, SamplingParams
from octavo.core.outputs import CompletionOutput
from octavo.errors import InvalidRequest
from tests.conformance.runtimes import LEVELS

NAMED = (5, 600, 17)
PROMPTS = ["Once upon a time", "The big red"]


@pytest.fixture(scope="module", params=["cpu", "reference"])
def llm(request: pytest.FixtureRequest) -> Iterator[LLM]:
    if request.param == "cpu" and not LEVELS:
        pytest.skip("the compiled kernels cannot run on this machine")
    options: dict[str, Any] = {"max_logprobs": -1, "max_model_len": 64, "num_gpu_blocks_override": 64}
    with LLM("octavo-tiny", device=request.param, **options) as llm:
        yield llm


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0.0},
        {"seed": 3, "n": 2},
        {"seed": 1, "frequency_penalty": 1.5, "repetition_penalty": 1.3, "logit_bias": {17: 3.0}, "bad_words": ["a"]},
    ],
    ids=["greedy", "n", "processors"],
)
def test_named_tokens_are_described_as_among_all(llm: LLM, params: dict[str, Any]) -> None:
    def outputs(**more: Any) -> list[CompletionOutput]:
        asked = [SamplingParams(max_tokens=6, **params, **more), SamplingParams(max_tokens=4, logprobs=2)]
        return llm.generate(PROMPTS, asked, use_tqdm=False)[0].outputs

    for named, whole in zip(outputs(logprob_token_ids=NAMED), outputs(logprobs=-1), strict=True):
        assert named.token_ids == whole.token_ids
        assert named.logprobs is not None
        assert whole.logprobs is not None
        for token_id, some, every in zip(named.token_ids, named.logprobs, whole.logprobs, strict=True):
            assert [*some] == [token_id, *(each for each in NAMED if each != token_id)]
            assert {each: some[each].logprob for each in some} == {each: every[each].logprob for each in some}
            # of tokens that tie, the list has one after the other
            ranks = {each: 1 + sum(other.logprob > every[each].logprob for other in every.values()) for each in some}
            assert {each: some[each].rank for each in some} == ranks


def test_named_token_outside_the_vocabulary_is_refused(llm: LLM) -> None:
    [output] = llm.generate(PROMPTS[0], SamplingParams(logprob_token_ids=(10**6,)), use_tqdm=False)
    assert output.error is not None
    assert output.error.field == "logprob_token_ids"


@pytest.mark.parametrize("value", [(), (-1,), (1,) * 129])
def test_named_tokens_have_limits(value: tuple[int, ...]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        SamplingParams(logprob_token_ids=value)
    assert caught.value.field == "logprob_token_ids"
