from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from octavo.core.sampling_params import SamplingParams
from octavo.sampling.processors import Penalties, ProcessedRow
from octavo.sampling.processors.penalties import TokenCounts
from tests.sampling.sequences import FakeSequence


def penalised(logits: torch.Tensor, *sequences: FakeSequence, processor: Penalties | None = None) -> torch.Tensor:
    processor = processor or Penalties()
    processor.update([ProcessedRow(row, sequence.row()) for row, sequence in enumerate(sequences)])
    changed = logits.clone()
    processor.apply(changed)
    return changed


def by_definition(logits: torch.Tensor, sequence: FakeSequence) -> list[float]:
    params = sequence.params
    values = []
    for token_id, logit in enumerate(logits.tolist()):
        count = sequence.output.count(token_id)
        if count or token_id in sequence.prompt:
            logit = logit / params.repetition_penalty if logit > 0 else logit * params.repetition_penalty
        values.append(logit - params.frequency_penalty * count - params.presence_penalty * (count > 0))
    return values


@pytest.mark.parametrize(
    "params",
    [
        {"repetition_penalty": 1.3},
        {"repetition_penalty": 0.5},
        {"frequency_penalty": 0.7},
        {"presence_penalty": -1.1},
        {"repetition_penalty": 1.2, "frequency_penalty": -0.5, "presence_penalty": 0.9},
    ],
)
def test_penalties_agree_with_their_formulas(params: dict[str, Any]) -> None:
    sequence = FakeSequence(SamplingParams(**params), [1, 2, 2, 9], [4, 2, 4, 4])
    logits = torch.randn(1, 12, generator=torch.Generator().manual_seed(0))
    expected = torch.tensor([by_definition(logits[0], sequence)])
    torch.testing.assert_close(penalised(logits, sequence), expected)


def test_repetition_agrees_with_transformers() -> None:
    from transformers.generation.logits_process import RepetitionPenaltyLogitsProcessor

    sequence = FakeSequence(SamplingParams(repetition_penalty=1.4), [1, 2, 2, 9], [4, 2])
    logits = torch.randn(1, 12, generator=torch.Generator().manual_seed(1))
    theirs = RepetitionPenaltyLogitsProcessor(1.4)(torch.tensor([[1, 2, 2, 9, 4, 2]]), logits.clone())
    torch.testing.assert_close(penalised(logits, sequence), theirs)


def test_counting_step_by_step_equals_counting_at_once() -> None:
    generator = np.random.default_rng(0)
    tokens = generator.integers(0, 300, 500)
    grown = TokenCounts(100)
    for end in (40, 100, 101, 102, 350, 500):
        grown.catch_up(tokens[:end])
    at_once = TokenCounts(100)
    at_once.catch_up(tokens)
    for counts in (grown, at_once):
        found = dict(zip(counts.token_ids.tolist(), counts.output_counts.tolist(), strict=True))
        assert found == {token: float((tokens[100:] == token).sum()) for token in set(tokens.tolist())}


def test_each_row_is_penalised_for_its_own_tokens_and_counts_are_kept() -> None:
    processor = Penalties()
    first = FakeSequence(SamplingParams(frequency_penalty=1.0), [1], [2])
    second = FakeSequence(SamplingParams(frequency_penalty=2.0), [2], [3, 3])
    logits = torch.zeros(2, 5)
    assert penalised(logits, first, second, processor=processor).tolist() == [[0, 0, -1, 0, 0], [0, 0, 0, -4, 0]]
    first.output.append(2)
    assert penalised(logits, second, first, processor=processor).tolist() == [[0, 0, 0, -4, 0], [0, 0, -2, 0, 0]]
