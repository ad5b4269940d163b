"""What weight formats cost in quality: the bounds that docs/design/quantization.md states, on a sample of its text."""

from __future__ import annotations

import pytest

from benchmarks.perplexity import held_out, perplexity
from octavo import LLM, SamplingParams

KINDS = ("story", "prose", "chat")
DOCUMENTS = 6


@pytest.fixture(scope="module")
def plain() -> dict[str, float]:
    with LLM(threads=1, num_gpu_blocks_override=256) as llm:
        return {kind: perplexity(llm, held_out(kind, DOCUMENTS)) for kind in KINDS}


@pytest.mark.parametrize(("quantization", "bound"), [("int8", 0.005), ("int4", 0.02), ("int4-g128", 0.02)])
def test_perplexity_changes_by_less_than_stated(quantization: str, bound: float, plain: dict[str, float]) -> None:
    with LLM(quantization=quantization, threads=1, num_gpu_blocks_override=256) as llm:
        for kind in KINDS:
            change = perplexity(llm, held_out(kind, DOCUMENTS)) / plain[kind] - 1
            assert 0 < abs(change) < bound


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_a_request_gets_the_same_tokens_and_log_probabilities_alone_and_in_a_batch(quantization: str) -> None:
    prompts = ["Once upon a time", "The fox", "Who are you?", "One day a bear went to the lake and"]
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=16, logprobs=2)
    with LLM(quantization=quantization, threads=2, num_gpu_blocks_override=256) as llm:
        batch = [output.outputs[0] for output in llm.generate(prompts, params)]
        alone = [llm.generate([prompt], params)[0].outputs[0] for prompt in prompts]
    assert [each.token_ids for each in batch] == [each.token_ids for each in alone]
    assert [each.logprobs for each in batch] == [each.logprobs for each in alone]
