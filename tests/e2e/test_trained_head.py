"""A head that was trained for octavo-tiny (`training/octavo_tiny/draft_head.py`) guesses most of its tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from octavo import LLM, SamplingParams
from octavo.core.outputs import CompletionOutput
from tests.conformance.runtimes import LEVELS
from tests.e2e.test_draft_models import stats, take_all

pytestmark = pytest.mark.skipif(not LEVELS, reason="the compiled kernels cannot run on this machine")

HEAD = Path(__file__).parents[1] / "data" / "octavo-tiny-eagle"
BEGINNINGS = ["Once upon a time there was a little", "Two friends went to the forest", "The capital of France"]
QUESTIONS = ["Tell me a story about a dog.", "What is 3 + 4?", "Who are you?", "What is a KV cache?", "Write a poem."]


def generated(params: SamplingParams, **options: Any) -> tuple[list[list[CompletionOutput]], float]:
    """Return stories and answers, and the tokens of a row that verifies guesses."""
    with LLM("octavo-tiny", num_gpu_blocks_override=256, **options) as llm:
        if options:
            take_all(llm)
        outputs = llm.generate(BEGINNINGS, params, use_tqdm=False)
        outputs += llm.chat([[{"role": "user", "content": each}] for each in QUESTIONS], params, use_tqdm=False)
        counts = stats(llm)
        return [each.outputs for each in outputs], 1 + counts.num_accepted_tokens / max(1, counts.num_drafts)


@pytest.mark.parametrize(
    ("temperature", "draws", "least", "ranks"),
    [
        (0.0, "greedy", 3.5, 1),
        (1.0, "greedy", 3.0, 1),
        (1.0, "same_key", 3.4, 1),
        pytest.param(0.0, "greedy", 3.5, 2, marks=pytest.mark.long),
    ],
)
def test_most_guesses_are_right_and_change_no_bit(temperature: float, draws: str, least: float, ranks: int) -> None:
    params = SamplingParams(temperature=temperature, seed=1, max_tokens=96, logprobs=1)
    expected, _ = generated(params)
    config = {"method": "eagle", "model": str(HEAD), "num_speculative_tokens": 4, "draft_sample_method": draws}
    found, tokens_per_row = generated(params, speculative_config=config, tensor_parallel_size=ranks, threads=1)
    assert found == expected
    assert least < tokens_per_row < 5
