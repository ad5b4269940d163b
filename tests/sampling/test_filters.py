from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from octavo.core.sampling_params import SamplingParams
from octavo.sampling.filters import default_filters, filtered_probabilities, scale
from octavo.sampling.top_tokens import filtered_top_tokens


def kept_tokens(logits: list[float], **params: Any) -> list[int]:
    probabilities = filter_rows(torch.tensor([logits]), SamplingParams(**params))
    return probabilities[0].nonzero().flatten().tolist()


def filter_rows(logits: Tensor, *params: SamplingParams) -> Tensor:
    return filtered_probabilities(scale(logits, [each.temperature for each in params]), params)


def expected_row(logits: Tensor, params: SamplingParams) -> set[int]:
    """min-p, then top-k, then top-p by the definitions, in float64 with a sort."""
    p = torch.softmax(logits.double() / params.temperature, -1)
    alive = p >= params.min_p * p.max()
    if params.top_k > 0:
        alive &= p >= p.masked_fill(~alive, 0).topk(min(params.top_k, len(p))).values[-1]
    p = p.masked_fill(~alive, 0)
    p /= p.sum()
    kept: set[int] = set()
    mass = 0.0
    for token in p.argsort(descending=True, stable=True).tolist():
        if not alive[token] or mass >= params.top_p:
            break
        kept.add(token)
        mass += float(p[token])
    return kept


@pytest.mark.parametrize("spread", [0.5, 3.0, 12.0])
@pytest.mark.parametrize(
    "params",
    [
        {"top_k": 1},
        {"top_k": 40},
        {"top_k": 5000},
        {"top_p": 0.1},
        {"top_p": 0.9},
        {"top_p": 0.999},
        {"min_p": 0.05},
        {"min_p": 1.0},
        {"top_k": 40, "top_p": 0.8},
        {"top_k": 40, "top_p": 0.8, "min_p": 0.1, "temperature": 1.7},
        {"top_p": 0.5, "temperature": 0.3},
    ],
)
def test_filters_keep_what_their_definitions_say(params: dict[str, Any], spread: float) -> None:
    logits = torch.randn(4, 1000, generator=torch.Generator().manual_seed(1)) * spread
    sampling = SamplingParams(**params)
    assert any(each.needs(sampling) for each in default_filters())
    probabilities = filter_rows(logits, *[sampling] * 4)
    for row in range(4):
        assert set(probabilities[row].nonzero().flatten().tolist()) == expected_row(logits[row], sampling)


@pytest.mark.parametrize("params", [{"top_k": 7}, {"top_p": 0.7}, {"min_p": 0.2}, {"top_k": 20, "top_p": 0.6}])
def test_kept_tokens_agree_with_transformers(params: dict[str, Any]) -> None:
    from transformers.generation.logits_process import (
        LogitsProcessorList,
        MinPLogitsWarper,
        TemperatureLogitsWarper,
        TopKLogitsWarper,
        TopPLogitsWarper,
    )

    makers = {"top_k": TopKLogitsWarper, "top_p": TopPLogitsWarper, "min_p": MinPLogitsWarper}
    warpers = LogitsProcessorList(
        [TemperatureLogitsWarper(0.8)] + [makers[name](value) for name, value in params.items()]
    )
    logits = torch.randn(6, 500, generator=torch.Generator().manual_seed(2)) * 2
    theirs = torch.softmax(warpers(torch.zeros(6, 1, dtype=torch.long), logits.clone()), dim=-1)
    ours = filter_rows(logits, *[SamplingParams(temperature=0.8, **params)] * 6)
    assert torch.equal(ours > 0, theirs > 0)
    torch.testing.assert_close(ours / ours.sum(-1, keepdim=True), theirs)


def test_tokens_that_tie_with_the_boundary_stay() -> None:
    assert kept_tokens([1.0, 3.0, 2.0, 2.0, 0.0], top_k=2) == [1, 2, 3]
    assert kept_tokens([0.0] * 8, top_p=0.3) == list(range(8))


def test_one_token_always_remains() -> None:
    assert kept_tokens([0.0, 9.0, 1.0], top_p=1e-9) == [1]
    assert kept_tokens([0.0, 9.0, 1.0], top_k=1, top_p=1e-9, min_p=1.0) == [1]
    assert kept_tokens([-math.inf, -math.inf, 1.0], top_p=0.999999, temperature=0.01) == [2]


def test_top_p_next_to_one_cuts_nothing_it_should_not() -> None:
    logits = torch.randn(3, 777, generator=torch.Generator().manual_seed(3))
    probabilities = filter_rows(logits, *[SamplingParams(top_p=1 - 1e-12)] * 3)
    assert (probabilities > 0).all()


def test_tiny_temperature_does_not_overflow() -> None:
    probabilities = filter_rows(torch.tensor([[3e38, -3e38, 1.0]]), SamplingParams(temperature=1e-5, top_p=0.9))
    assert probabilities.tolist() == [[1.0, 0.0, 0.0]]


@settings(max_examples=30)
@given(
    rows=st.lists(
        st.tuples(
            st.integers(0, 1000),
            st.sampled_from([0, 1, 3, 50]),
            st.sampled_from([1.0, 0.95, 0.5, 0.01]),
            st.sampled_from([0.0, 0.1, 0.9]),
            st.sampled_from([0.2, 1.0, 3.0]),
        ),
        min_size=1,
        max_size=7,
    ),
    vocab_size=st.sampled_from([5, 64, 501]),
)
def test_a_row_has_the_same_bits_in_a_batch(rows: list[tuple[int, int, float, float, float]], vocab_size: int) -> None:
    params = [SamplingParams(top_k=k, top_p=p, min_p=m, temperature=t) for _, k, p, m, t in rows]
    # coarse values, so that ties are common
    logits = (
        torch.stack([torch.randn(vocab_size, generator=torch.Generator().manual_seed(seed)) for seed, *_ in rows])
        .bfloat16()
        .float()
    )
    together = filter_rows(logits, *params)
    for row, each in enumerate(params):
        assert torch.equal(filter_rows(logits[row : row + 1], each)[0], together[row])


# masses 1/2, 1/4, 1/8, 1/8 of which float32 and all sums are exact
POWERS_OF_TWO = [0.0, -math.log(2), -2 * math.log(2), -2 * math.log(2)]


@pytest.mark.parametrize(
    ("top_p", "num_kept"),
    [(0.25, 1), (0.5, 1), (math.nextafter(0.5, 1), 2), (0.75, 2), (math.nextafter(0.75, 1), 4), (0.875, 4)],
)
@pytest.mark.parametrize("others", [0, 500])
def test_top_p_ends_with_the_token_that_reaches_it(top_p: float, num_kept: int, others: int) -> None:
    logits = torch.tensor([POWERS_OF_TWO + [-200.0] * others])
    params = SamplingParams(top_p=top_p)
    assert filter_rows(logits, params)[0].nonzero().flatten().tolist() == list(range(num_kept))
    top = filtered_top_tokens(scale(logits, [1.0]), [params])
    assert top.is_decided == [True]
    assert sorted(top.token_ids[0, top.weights[0] > 0].tolist()) == list(range(num_kept))


def test_top_p_ends_with_the_token_that_reaches_it_among_tokens_that_are_nearly_as_likely() -> None:
    logits = torch.randn(1, 30, generator=torch.Generator().manual_seed(4)) / 20
    likeliest = torch.softmax(scale(logits, [1.0]), dim=-1)[0].sort(descending=True)
    reached = likeliest.values.double().cumsum(0).tolist()
    for place, mass in enumerate(reached[:-1]):
        for top_p, num_kept in ((mass, place + 1), (math.nextafter(mass, 1), place + 2)):
            kept = filter_rows(logits, SamplingParams(top_p=top_p))[0].nonzero().flatten().tolist()
            assert sorted(kept) == sorted(likeliest.indices[:num_kept].tolist())
