"""Log-probabilities of the distributions from which tokens are drawn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from octavo.core.sampling_params import SamplingParams
from octavo.core.step import TokenLogprobs
from octavo.devices.cpu.sampler import NativeSampler
from octavo.devices.reference.sampler import ReferenceSampler
from octavo.sampling.metadata import RowSamples, SamplingRow
from octavo.sampling.processed_logprobs import ProcessedLogprobs
from octavo.sampling.sampler import DescribingSampler
from tests.conformance.runtimes import LEVELS, runtime
from tests.sampling.sequences import FakeSequence

VOCAB = 64
ASKED: list[dict[str, Any]] = [
    {"temperature": 0.7, "logprobs": 5},
    {"temperature": 1.3, "top_k": 3, "logprobs": 5},
    {"temperature": 0.9, "top_p": 0.6, "logprobs": 0},
    {"temperature": 0.8, "min_p": 0.2, "repetition_penalty": 1.5, "logprobs": 2},
    {"temperature": 0.0, "allowed_token_ids": (3, 5), "logprobs": 4},
    {"temperature": 0.0, "logit_bias": {7: 3.0}, "logprobs": 1},
    {"temperature": 1.0},
]


def samplers() -> list[DescribingSampler]:
    return [ReferenceSampler(), *(NativeSampler(runtime(level).cpu) for level in LEVELS)]


def rows_of(asked: Sequence[dict[str, Any]]) -> list[SamplingRow]:
    return [
        FakeSequence(SamplingParams(seed=number, max_tokens=9, **each), [1, 2, 7], [3]).row(2 if number == 1 else 1)
        for number, each in enumerate(asked)
    ]


def make_logits(count: int) -> Tensor:
    return torch.randn(count, VOCAB, generator=torch.Generator().manual_seed(1)) * 2


def by_formula(logits: Tensor, params: SamplingParams) -> Tensor:
    """Return log-probabilities [vocab], computed in float64."""
    values = logits.double().clone()
    for token_id in {1, 2, 3, 7} if params.repetition_penalty != 1.0 else ():
        values[token_id] *= (1 / params.repetition_penalty) if values[token_id] > 0 else params.repetition_penalty
    for token_id, bias in (params.logit_bias or {}).items():
        values[token_id] += bias
    if params.allowed_token_ids:
        barred = torch.ones(VOCAB, dtype=torch.bool).index_fill(0, torch.tensor(params.allowed_token_ids), False)
        values[barred] = -torch.inf
    if params.is_greedy:
        return values.log_softmax(-1)
    values /= params.temperature
    probabilities = values.softmax(-1)
    order = probabilities.argsort(descending=True)
    if params.min_p:
        values[probabilities < params.min_p * probabilities.max()] = -torch.inf
    if params.top_k > 0:
        values[order[params.top_k :]] = -torch.inf
    if params.top_p < 1:
        before = probabilities[order].cumsum(-1) - probabilities[order]
        values[order[before >= params.top_p]] = -torch.inf
    return values.log_softmax(-1)


@pytest.mark.parametrize("sampler", samplers(), ids=lambda each: type(each).__name__)
def test_tokens_are_those_that_were_drawn_described_by_what_they_were_drawn_from(sampler: DescribingSampler) -> None:
    logits, rows = make_logits(len(ASKED)), rows_of(ASKED)
    plain = sampler.sample(logits.clone(), rows)
    found = ProcessedLogprobs(sampler).sample(logits.clone(), rows)
    for row, before, result, values in zip(rows, plain, found, logits, strict=True):
        params = row.sequence.params
        assert [each.token_id for each in result.tokens] == [each.token_id for each in before.tokens]
        if params.logprobs is None:
            assert result == before
            continue
        expected = by_formula(values, params)
        for token in result.tokens:
            assert token.logprob == pytest.approx(float(expected[token.token_id]), abs=1e-5)
            assert token.rank == int((expected > expected[token.token_id]).sum()) + 1
            wanted = expected.topk(params.logprobs)
            num_possible = int((wanted.values > -torch.inf).sum())
            assert list(token.top_ids) == wanted.indices[:num_possible].tolist()
            assert list(token.top_logprobs) == pytest.approx(wanted.values[:num_possible].tolist(), abs=1e-5)


@pytest.mark.parametrize("sampler", samplers(), ids=lambda each: type(each).__name__)
def test_neighbours_change_no_bit(sampler: DescribingSampler) -> None:
    logits, rows = make_logits(len(ASKED)), rows_of(ASKED)
    processed = ProcessedLogprobs(sampler)
    together = processed.sample(logits.clone(), rows)
    for place, row in enumerate(rows):
        assert processed.sample(logits[place : place + 1].clone(), [row]) == [together[place]]


def test_a_row_from_which_nothing_can_be_drawn_keeps_its_error() -> None:
    (row,) = rows_of([{"temperature": 1.0, "logprobs": 1}])
    (result,) = ProcessedLogprobs(ReferenceSampler()).sample(torch.full((1, VOCAB), torch.nan), [row])
    assert isinstance(result, RowSamples)
    assert result.error is not None
    assert result.tokens == list[TokenLogprobs]()
