"""The rules of speech are those of transformers' processors, whatever was written so far."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from octavo.core.speech import SpeechTokens
from octavo.sampling.processors import ProcessedRow
from octavo.sampling.processors.speech import SpeechRules

VOCABULARY, FIRST_STAMP = 60, 40
TOKENS = SpeechTokens(
    start=31, end=30, no_timestamps=39, languages={"en": 32}, tasks={"transcribe": 33, "translate": 34},
    suppressed=(3, 4), suppressed_first=(5, 30), max_initial=6,
)  # fmt: skip


def ruled(logits: torch.Tensor, prompt: list[int], output: list[int], **params: Any) -> torch.Tensor:
    rules, found = SpeechRules(TOKENS), logits.clone()[None]
    sequence = SimpleNamespace(num_prompt_tokens=len(prompt), params=SimpleNamespace(allowed_token_ids=None, **params))
    sampling: Any = SimpleNamespace(sequence=sequence, tokens=np.array(prompt + output))
    rules.update([ProcessedRow(0, sampling)])
    rules.apply(found)
    return found[0]


@pytest.mark.parametrize("seed", range(40))
def test_timestamps_follow_the_rules_of_transformers(seed: int) -> None:
    from transformers.generation.logits_process import WhisperTimeStampLogitsProcessor

    choose = random.Random(seed)
    output = [choose.choice((7, 8, 41, 43, 47, 50)) for _ in range(seed % 6)]
    logits = torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(seed)) * 3
    if seed % 2:
        logits[FIRST_STAMP:] -= 9
    config: Any = SimpleNamespace(
        no_timestamps_token_id=39, eos_token_id=30, bos_token_id=30, max_initial_timestamp_index=6
    )
    barred = logits.clone()
    barred[[3, 4]] = -torch.inf
    if not output:
        barred[[5, 30]] = -torch.inf
    expected = WhisperTimeStampLogitsProcessor(config, begin_index=3)(
        torch.tensor([[31, 32, 33, *output]]), barred[None]
    )
    assert torch.equal(ruled(logits, [31, 32, 33], output), expected[0])


def test_a_prompt_without_timestamps_bars_suppressed_tokens_alone() -> None:
    logits = torch.zeros(VOCABULARY)
    barred = {i for i, each in enumerate(ruled(logits, [31, 32, 33, 39], []).tolist()) if each < 0}
    assert barred == {3, 4, 5, 30}
    barred = {i for i, each in enumerate(ruled(logits, [31, 32, 33, 39], [7]).tolist()) if each < 0}
    assert barred == {3, 4}
